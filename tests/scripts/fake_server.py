"""A server that speaks as much of SGLang's HTTP as scripts/soak uses, with a cache of its own and a fault on request.

Its model is a hash: the next token depends on all tokens before it, so a cache that gives a wrong state would show."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VOCABULARY = 1000


class Fake(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, fault: str = ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.lock = fault, threading.Lock()
        self.texts: list[tuple[str | None, list[int]]] = []
        self.served = self.flushed_rows = 0
        self.aborted: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def match(self, key: str | None, ids: list[int]) -> int:
        with self.lock:
            texts = [text for other, text in self.texts if other == key or self.fault == "not-isolated"]
        if self.fault == "no-hits":
            return 0
        return min(max((len(os.path.commonprefix([ids, text])) for text in texts), default=0), len(ids) - 1)

    def handle_error(self, request, client_address):
        """A client that goes away is part of the load."""


def next_token(ids: list[int]) -> int:
    return 2 + zlib.crc32(json.dumps(ids).encode()) % (VOCABULARY - 2)


def problem(body: dict) -> str | None:
    ids, sampling = body.get("input_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids) or len(ids) > 260:
        return "bad input_ids"
    if not isinstance(sampling, dict) or sampling["max_new_tokens"] < 0 or sampling["temperature"] < 0:
        return "bad sampling_params"
    ratio = sampling.get("custom_params", {}).get("tail_replay_ratio", 1.0)
    if sampling.get("top_p", 1) > 1 or not isinstance(ratio, float) or not 0 < ratio <= 1:
        return "bad number"
    return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/metrics":
            name = "sglang_tail_replay_rows_used".replace("sglang_", "sglang:")
            rows = sum(len(text) for _, text in self.server.texts) + (self.server.fault == "row-leak")
            return self.reply(200, f"# TYPE {name} gauge\n{name} {rows}\n")
        return self.reply(200, "")

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/flush_cache"):
            if self.server.fault != "stale":
                self.server.texts.clear()
            return self.reply(200, "flushed")
        body = json.loads(raw)
        if self.path == "/abort_request":
            self.server.aborted.add(body["rid"])
            return self.reply(200, "")
        return self.generate(body)

    def generate(self, body: dict) -> None:
        fault, wrong = self.server.fault, problem(body)
        if wrong:
            status = {"5xx-for-bad": 500, "accepts-bad": 200}.get(fault, 400)
            return self.reply(status, {"error": {"message": "" if fault == "silent" else wrong}})
        with self.server.lock:
            self.server.served += 1
            strikes = self.server.served % 7 == 0
        ids, key = body["input_ids"], body.get("extra_key")
        cached = self.server.match(key, ids)
        if strikes and fault in ("5xx", "hang"):
            time.sleep(3 if fault == "hang" else 0)
            return self.reply(500, {"error": {"message": "planted"}})
        state = list(ids)
        if cached and fault == "wrong-token" and strikes:
            state[0] ^= 1  # a state that lost an early token
        answer = []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            answer.append(next_token(state + answer))
        if fault == "short" and strikes:
            answer.pop()
        with self.server.lock:
            self.server.texts.append((key, ids + answer))
        cached += fault == "cached-too-much" and strikes and key is None
        return self.answer(body, answer, cached, nan=fault == "nan" and strikes)

    def answer(self, body: dict, answer: list[int], cached: int, nan: bool) -> None:
        def event(tokens, finish):
            probabilities = [[None if nan else -0.5, token, None] for token in tokens]
            meta = {"cached_tokens": cached, "finish_reason": finish, "output_token_logprobs": probabilities}
            meta["output_top_logprobs"] = [[p, [-3.0, 1, None]] for p in probabilities]
            return {"output_ids": tokens, "meta_info": meta}

        if not body.get("stream"):
            return self.reply(200, event(answer, {"type": "length"}))
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for n in range(1, len(answer) + 1):
            over = body["rid"] in self.server.aborted or n == len(answer)
            kind = "abort" if n < len(answer) else "length"
            self.wfile.write(
                b"data: " + json.dumps(event(answer[:n], {"type": kind} if over else None)).encode() + b"\n\n"
            )
            if over:
                break
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
