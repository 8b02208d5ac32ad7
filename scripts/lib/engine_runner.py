"""The child process that owns one engine: starts it, runs the sections of a plan on it, and writes the outcome after
every section. A runner module gives it sections and calls `main`:

    python check_runner.py PLAN.json OUT.json PROGRESS_FD

A process of its own, started by engine_process.py: its end gives the GPU memory back, and a crash or a hang costs only
this engine's remaining sections."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import report
from prompts import Prompt, tokens

TURN = "MEASURE_TURN"  # names a file: engines that share it start side by side and measure one after the other


@dataclass
class Runner:
    """An engine and how it is asked. A section is a method that yields samples; SUMMARIES says what they add up to."""

    SUMMARIES: ClassVar[Mapping[str, Callable[[list], Any]]] = {"capacity": lambda rows: rows[0]}

    plan: Any  # name, args, vocab_size and sections are used here
    engine: Any
    say: Callable[[str], None]
    host_used_before: float

    # ------------------------------------------------------------------------------------------------ requests

    def ids(self, prompt: Prompt) -> list[int]:
        return tokens(prompt, self.plan.vocab_size)

    @staticmethod
    def sampling(new_tokens: int, ratio: float | None) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        if ratio is not None:
            sampling["custom_params"] = {"tail_replay_ratio": ratio}
        return sampling

    def ask(self, input_ids: list, new_tokens: int = 1, ratio: float | None = None, **options) -> Any:
        return self.engine.generate(input_ids=input_ids, sampling_params=self.sampling(new_tokens, ratio), **options)

    def timed(self, *args, **options) -> tuple[float, Any]:
        start = time.perf_counter()
        reply = self.ask(*args, **options)
        return time.perf_counter() - start, reply

    def flush(self) -> None:
        """SGLang refuses while a step is in flight, which the last answer does not wait for."""
        deadline = time.monotonic() + 30
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise RuntimeError("the engine did not become idle within 30 s, so its cache could not be flushed")
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------ sections

    def capacity(self) -> Iterator[dict[str, Any]]:
        info = self.engine.get_server_info()
        state = info["internal_states"][0]
        kept = ("max_total_num_tokens", "max_running_requests", "effective_max_running_requests_per_dp", "page_size")
        kept += ("attention_backend", "chunked_prefill_size", "cuda_graph_config", "radix_cache_backend", "dtype")
        merged = {**state, **info}
        yield {
            "memory_usage": state["memory_usage"],
            "settings": {key: merged[key] for key in sorted(merged) if key in kept or "mamba" in key},
            "max_total_num_tokens": info["max_total_num_tokens"],
            "gpu_used_mib": gpu_used_mib(),
            "host_used_gib": round(host_used_gib() - self.host_used_before, 1),
        }


def cache_facts(reply: dict[str, Any]) -> dict[str, int | str | None]:
    meta = reply["meta_info"]
    return {
        "cached": meta["cached_tokens"],
        "replayed": report.told(meta, "replayed"),
        "generation": report.told(meta, "generation"),
        "start": report.told(meta, "start"),
    }


def gpu_used_mib() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    except (OSError, subprocess.CalledProcessError):
        return None


def host_used_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) / 2**20


def run_section(runner: Runner, section: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Hands the outcome to `keep` now and then, and at the end. A failure keeps what was measured before it."""
    start, kept_at, rows, error = time.monotonic(), 0.0, [], None

    def outcome(error: str | None) -> dict[str, Any]:
        seconds = round(time.monotonic() - start, 1)
        result = runner.SUMMARIES[section](rows) if rows else None
        return {"ok": error is None, "error": error, "wall_seconds": seconds, "result": result, "samples": rows}

    try:
        for row in getattr(runner, section)():
            rows.append(row)
            if time.monotonic() - kept_at > 5:
                keep(outcome("cut off"))
                kept_at = time.monotonic()
    except Exception:
        error = traceback.format_exc()
        runner.say(f"{section} FAILED\n{error}")
    keep(outcome(error))


def start_engine(args: Mapping[str, Any]) -> Any:
    import sglang

    return sglang.Engine(**args)


@contextmanager
def turn(path: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of that file. Without a path nobody else measures."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        with asleep():
            say("engine waits for its turn")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def asleep() -> Iterator[None]:
    """Stop the processes below this one: those of an idle engine poll, and would slow down the one that is measured."""
    import psutil

    below = psutil.Process().children(recursive=True)
    for process in below:
        process.suspend()
    try:
        yield
    finally:
        for process in below:
            process.resume()


def main(make_runner: type[Runner], plan: Any, out_path: str, progress_fd: str) -> int:
    progress = os.fdopen(int(progress_fd), "w", buffering=1)
    os.set_inheritable(progress.fileno(), False)
    began, used = time.monotonic(), host_used_gib()

    def say(text: str) -> None:
        print(f"[{plan.name} {time.monotonic() - began:5.0f} s] {text}", file=progress, flush=True)

    outcome: dict[str, Any] = {"start_seconds": None, "sections": {}, "error": "the engine did not start"}
    write(out_path, outcome)
    runner = make_runner(plan, start_engine(plan.args), say, used)
    started = round(time.monotonic() - began, 1)
    with turn(os.environ.get(TURN), say):
        outcome["start_seconds"] = started
        say("engine ready")
        for section in plan.sections:
            outcome["error"] = f"ended during {section}"
            write(out_path, outcome)

            def keep(result: dict[str, Any], section: str = section) -> None:
                outcome["sections"][section] = result
                write(out_path, outcome)

            run_section(runner, section, keep)
    outcome["error"] = None
    write(out_path, outcome)
    runner.engine.shutdown()
    return 0


def write(path: str, outcome: dict[str, Any]) -> None:
    partial = Path(path + ".partial")
    partial.write_text(json.dumps(outcome))
    partial.replace(path)
