"""A tokenizer of characters, data in the published formats, and a server that keeps account of its cache."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BOS = 1
FIRST = 3  # id of the first character; 2 ends a sequence


class Characters:
    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [BOS] * add_special_tokens + [FIRST + ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i - FIRST) for i in ids if i >= FIRST or not skip_special_tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **switches):
        return f"<user>{messages[0]['content']}</user><model>"


def squad(paragraphs=6, questions=2):
    """SQuAD's format: people and where they live."""

    def paragraph(i):
        text = f"Person {i} lives in town {i}, in house {i + 100}."
        qas = [
            {"question": f"Where is home {j} of person {i}?", "answers": [{"text": f"town {i}"}]}
            for j in range(questions)
        ]
        unanswerable = {"question": "Who?", "answers": [], "is_impossible": True}
        return {"context": text, "qas": [*qas, unanswerable]}

    return {"data": [{"title": "people", "paragraphs": [paragraph(i) for i in range(paragraphs)]}]}


def longbench_record(i, words=60):
    context = f"The keeper of lamp {i} is Ada. " + " ".join(f"word{j}" for j in range(words))
    record = {"input": f"Who keeps lamp {i}?", "context": context, "answers": ["Ada", "Ada, the keeper"]}
    return record | {"length": words, "dataset": "sample", "language": "en", "all_classes": None, "_id": str(i)}


def write_longbench(folder, tasks, records=3):
    folder.mkdir(exist_ok=True)
    for task in tasks:
        lines = [json.dumps(longbench_record(i)) for i in range(records)]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class FakeServer:
    """Answers with ids `output`; its faults are set from outside. `requests` are the bodies that it was sent."""

    def __init__(self, url, mode):
        self.url, self.mode, self.requests = url, mode, []
        self.output = [FIRST + ord("x")]
        self.short_by = 0  # tokens that a hit loses
        self.generation = 1
        self.seen: dict[str, list[list[int]]] = {}

    def generate(self, body):
        self.requests.append(body)
        ids, seen = body["input_ids"], self.seen.setdefault(body["extra_key"], [])
        longest = max((len(os.path.commonprefix([ids, other])) for other in seen), default=0)
        own = body["sampling_params"].get("custom_params", {})
        cached = max(0, min(longest, len(ids) - 1, own.get("tail_replay_max_matched", len(ids))) - self.short_by)
        seen.append(ids)
        ratio = own.get("tail_replay_ratio", 0.05)
        replayed = 0 if self.mode == "zero" else min(cached, max(4, -int(-cached * ratio // 1)))
        told = {"matched": cached, "replayed": replayed, "generation": int(replayed < cached) * self.generation}
        told["start"] = "exact" if replayed == cached else "zero"
        details = {f"tail_replay_{name}": value for name, value in told.items()} if cached else {}
        return {"output_ids": self.output, "meta_info": {"cached_tokens": cached, "cached_tokens_details": details}}


@contextmanager
def fake_server(mode="replay"):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(server.generate(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = FakeServer(f"http://127.0.0.1:{http.server_address[1]}", mode)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
