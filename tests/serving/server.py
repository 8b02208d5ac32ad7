"""A real SGLang server with the plugin, in its own process group, and a small synchronous client for it.

    flags = ("--tail-replay-ratio", "1.0", *SMALL, *FLOAT32)
    with serve(model_dir, *flags, env=FLOAT32_ENV, log_path=tmp_path / "log") as server:
        answer = server.generate(ids, max_new_tokens=8)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MODULE = "sglang_tailreplay.launch_server"
OURS = "sglang:tail_replay_"  # how our metrics begin

# Pools small enough for a CI machine. The state pool must be bounded: SGLang's own choice takes gigabytes.
SMALL = (
    *("--max-total-tokens", "4096", "--context-length", "2048", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "8", "--max-mamba-cache-size", "64", "--mem-fraction-static", "0.2"),
    "--sleep-on-idle",  # or its scheduler takes a whole core while another server is tested
)
FLOAT32 = ("--dtype", "float32")
FLOAT32_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # the conv state has its own dtype


class ServerDied(RuntimeError):
    """The server process ended, or never became ready. The message ends with the last lines of its log."""


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached_tokens: int
    matched: int | None  # these three: None where the answer does not tell them (a miss, or mode off)
    replayed: int | None
    generation: int | None
    logprobs: list[dict[int, float]] | None  # per new token, only with top_logprobs=N; holds the chosen token too
    finish_reason: str
    meta: dict[str, Any] = field(repr=False)


@dataclass
class Server:
    base_url: str
    log_path: Path
    process: subprocess.Popen

    def generate(
        self, ids: Sequence[int], max_new_tokens: int = 8, *, top_logprobs: int = 0, rid: str | None = None, **sampling
    ) -> Answer:
        """Greedy and of fixed length unless `sampling` says otherwise."""
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **sampling},
        }
        if rid:
            body["rid"] = rid
        if top_logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
        return _answer(self.post("/generate", body))

    def generate_many(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 8, *, concurrency: int = 8, **options
    ) -> list[Answer]:
        """Answers in the order of `prompts`, with at most `concurrency` requests in flight."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda ids: self.generate(ids, max_new_tokens, **options), prompts))

    def abort(self, rid: str) -> None:
        self.open("/abort_request", {"rid": rid})

    def flush(self, wait_seconds: float = 30) -> None:
        """Empty the cache. SGLang refuses while a request runs, so wait for it to become idle."""
        self.open(f"/flush_cache?timeout={wait_seconds}", {}, timeout=wait_seconds + 10)

    def info(self) -> dict[str, Any]:
        return self.get("/server_info")

    def metric_samples(self) -> list[Sample]:
        """Every sample on /metrics; needs --enable-metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.open("/metrics").decode())
        return [Sample(s.name, s.labels, s.value) for family in families for s in family.samples]

    def metrics(self) -> dict[str, float]:
        """Metric name -> sum over its label sets."""
        totals: dict[str, float] = {}
        for sample in self.metric_samples():
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def verified(self, seconds: float = 120) -> tuple[float, float, float]:
        """(hits verified, those that agree, nats) so far, once no hit waits; needs --tail-replay-verify-fraction 1."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.metric_samples()
            hits = sum(s.value for s in found if s.name == f"{OURS}requests_total" and s.labels["kind"] != "cold")
            value = {s.name.removeprefix(OURS): s.value for s in found if s.name.startswith(OURS)}
            if hits == value["verified_hits_total"] + value["unverified_hits_total"]:
                return tuple(value[name] for name in ("verified_hits_total", "agreeing_hits_total", "verified_kl_sum"))
            assert time.monotonic() < deadline, f"{hits} hits, of which these were seen to: {value}"
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Up, and past its warm-up. Generates nothing: `serve` switches SGLang's generating health check off."""
        try:
            self.open("/health", timeout=10)
        except OSError:
            return False
        return True

    def get(self, path: str) -> Any:
        return json.loads(self.open(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self.open(path, body))

    def open(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            error.add_note(f"{path}: {error.read().decode(errors='replace')[:2000]}")
            raise
        except OSError:
            self.check_alive(grace_seconds=1)
            raise

    def check_alive(self, grace_seconds: float = 0) -> None:
        """Raise ServerDied if the process has ended. A failed scheduler takes the HTTP process down a moment later."""
        deadline = time.monotonic() + grace_seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.process.poll() is not None:
            raise ServerDied(f"server ended with {self.process.returncode}\n{self.log_tail()}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join([f"--- last lines of {self.log_path}", *self.log().splitlines()[-lines:]])


@contextmanager
def serve(
    model_dir: str | os.PathLike,
    *flags: str,
    env: dict[str, str] | None = None,
    log_path: str | os.PathLike,
    ready_seconds: float = 180,
    module: str = MODULE,
) -> Iterator[Server]:
    """Start a server, wait until it is ready with an empty cache, and kill its process group at the end.

    Raises ServerDied if it does not become ready, or if it is found dead after the block."""
    server = start(model_dir, *flags, env=env, log_path=log_path, module=module)
    try:
        wait_ready(server, ready_seconds)
        server.flush()  # the warm-up request left its tokens in the cache
        yield server
        server.check_alive()
    finally:
        stop(server)


def start(
    model_dir: str | os.PathLike,
    *flags: str,
    env: dict[str, str] | None = None,
    log_path: str | os.PathLike,
    module: str = MODULE,
) -> Server:
    """Start the process and return at once."""
    log_path, port = Path(log_path).resolve(), free_port()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    model = Path(model_dir).resolve() if Path(model_dir).exists() else model_dir  # or a model hub's name
    command = [sys.executable, "-m", module, "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    defaults["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **defaults, **(env or {})},
            cwd=log_path.parent,  # never the checkout: it would shadow an installed package
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}", log_path, process)


def wait_ready(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not server.healthy():
        server.check_alive()
        if time.monotonic() > deadline:
            raise ServerDied(f"server not ready after {seconds:.0f} s\n{server.log_tail()}")
        time.sleep(0.2)


def stop(server: Server) -> None:
    """Kill the whole group: the scheduler and detokenizer outlive a killed parent."""
    try:
        os.killpg(server.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    server.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Answer(
        tokens=reply["output_ids"],
        cached_tokens=meta["cached_tokens"],
        matched=details.get("tail_replay_matched"),
        replayed=details.get("tail_replay_replayed"),
        generation=details.get("tail_replay_generation"),
        logprobs=_logprobs(meta) if "output_token_logprobs" in meta else None,
        finish_reason=(meta.get("finish_reason") or {}).get("type", ""),
        meta=meta,
    )


def _logprobs(meta: dict[str, Any]) -> list[dict[int, float]]:
    chosen = [{token: logprob} for logprob, token, _ in meta["output_token_logprobs"]]
    top = meta.get("output_top_logprobs") or [None] * len(chosen)
    return [{**one, **{token: lp for lp, token, _ in (many or [])}} for one, many in zip(chosen, top, strict=True)]
