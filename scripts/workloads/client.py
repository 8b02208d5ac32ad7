"""A client that speaks token ids and measures: what every workload sends goes through it. Standard library only."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Sample(NamedTuple):
    prompt: int  # tokens
    cached: int
    replayed: int
    new: int
    ttft_ms: float
    latency_ms: float


class Answer(NamedTuple):
    tokens: list[int]
    sample: Sample


class ServerError(RuntimeError):
    """The server answered with an error, or with something that is no answer."""


@dataclass
class Client:
    """Thread-safe. Answers are greedy and of fixed length, so that two servers get the same load."""

    url: str
    new_tokens: int
    timeout: float = 600
    samples: list[Sample] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def generate(self, ids: Sequence[int], new_tokens: int | None = None, **sampling: Any) -> Answer:
        """Send one prompt, streamed. ServerError where it fails."""
        count = self.new_tokens if new_tokens is None else new_tokens
        options = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **sampling}
        begin, first, events = time.perf_counter(), None, []
        for event in self._stream({"input_ids": list(ids), "sampling_params": options, "stream": True}):
            first = first or time.perf_counter()
            events.append(event)
        if not events:
            raise ServerError(f"{self.url}: an answer without a token")
        meta, end = events[-1]["meta_info"], time.perf_counter()
        details = meta.get("cached_tokens_details") or {}
        sample = Sample(
            meta["prompt_tokens"],
            meta["cached_tokens"],
            details.get("tail_replay_replayed") or 0,
            meta["completion_tokens"],
            (first - begin) * 1e3,
            (end - begin) * 1e3,
        )
        with self._lock:
            self.samples.append(sample)
        return Answer(_tokens(events), sample)

    def together(self, jobs: Iterable[Callable[[], Any]], concurrency: int) -> list[Any]:
        """Results in the order of the jobs, at most `concurrency` at once."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda job: job(), jobs))

    def flush(self) -> None:
        """Empty the server's cache."""
        self._request("POST", "/flush_cache?timeout=30", {})

    def info(self) -> dict[str, Any]:
        return json.loads(self._request("GET", "/server_info"))

    def metrics(self) -> list[str]:
        """Lines of /metrics; none where the server has no metrics."""
        try:
            return self._request("GET", "/metrics").decode().splitlines()
        except ServerError:
            return []

    def _stream(self, body: dict[str, Any]) -> Iterable[dict[str, Any]]:
        connection, response = self._open("POST", "/generate", body)
        with connection:
            for line in response:
                text = line.decode().strip()
                if text.startswith("data:") and text != "data: [DONE]":
                    event = json.loads(text[5:])
                    if "error" in event:
                        raise ServerError(f"{self.url}: {event['error']}")
                    yield event

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        connection, response = self._open(method, path, body)
        with connection:
            return response.read()

    def _open(self, method: str, path: str, body: dict[str, Any] | None):
        address = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = _Closing(kind(address.netloc, timeout=self.timeout))
        data = None if body is None else json.dumps(body)
        connection.inner.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.inner.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")[:500]
            connection.inner.close()
            raise ServerError(f"{self.url}{path}: HTTP {response.status}: {text}")
        return connection, response


class _Closing:
    """http.client's connections are no context managers."""

    def __init__(self, inner: http.client.HTTPConnection):
        self.inner = inner

    def __enter__(self) -> http.client.HTTPConnection:
        return self.inner

    def __exit__(self, *_: object) -> None:
        self.inner.close()


def _tokens(events: Sequence[dict[str, Any]]) -> list[int]:
    """Of a whole answer, whether the server sends all tokens or only new ones with every event."""
    wanted, last = events[-1]["meta_info"]["completion_tokens"], events[-1]["output_ids"]
    if len(last) == wanted:
        return last
    tokens = [token for event in events for token in event["output_ids"]]
    if len(tokens) != wanted:
        raise ServerError(f"{len(tokens)} tokens came, the server counts {wanted}")
    return tokens
