"""Start one engine, run the sections of a plan on it, and write the outcome after every section.

    python engine_runner.py PLAN.json OUT.json PROGRESS_FD

A process of its own, started by gpu_check.py: its end gives the GPU memory back, and a crash or a hang costs only this
engine's remaining sections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from measure import Case, EnginePlan, Prompt, Segment

NEW_TOKENS = 4  # compared per case
PROBES = (Segment("probes", 64),)  # tokens whose log-probability every answer of a case names


@dataclass
class Runner:
    plan: EnginePlan
    engine: Any
    say: Callable[[str], None]
    host_used_before: float

    # ------------------------------------------------------------------------------------------------ requests

    def ids(self, prompt: Prompt) -> list[int]:
        return measure.tokens(prompt, self.plan.vocab_size)

    def ask(self, input_ids: list, new_tokens: int = 1, ratio: float | None = None, **options) -> Any:
        sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        if ratio is not None:
            sampling["custom_params"] = {"tail_replay_ratio": ratio}
        return self.engine.generate(input_ids=input_ids, sampling_params=sampling, **options)

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

    def ttft(self) -> Iterator[dict[str, Any]]:
        requests = measure.ttft_plan(self.plan.sizes, self.plan.name)
        for number, request in enumerate(requests, start=1):
            ids = self.ids(request.prompt)
            seconds, reply = self.timed(ids, ratio=request.ratio)
            if number % 20 == 0 or number == len(requests):
                self.say(f"ttft {number}/{len(requests)}: {request.kind} of {len(ids)} took {seconds * 1e3:.0f} ms")
            if request.timed:
                yield {
                    "kind": request.kind,
                    "prompt_tokens": len(ids),
                    "matched": request.matched,
                    "ratio": request.ratio,
                    "ms": seconds * 1e3,
                    **cache_facts(reply),
                }

    def throughput(self) -> Iterator[dict[str, Any]]:
        for batch in measure.throughput_plan(self.plan.sizes):
            prompts = [self.ids(prompt) for prompt in batch.prompts]
            seconds, replies = self.timed(prompts, batch.max_new_tokens)
            self.say(f"throughput {batch.kind}: {seconds:.2f} s{'' if batch.timed else ' (warm-up)'}")
            if batch.timed:
                yield {
                    "kind": batch.kind,
                    "prompt_tokens": sum(map(len, prompts)),
                    "new_tokens": sum(reply["meta_info"]["completion_tokens"] for reply in replies),
                    "cached": sum(reply["meta_info"]["cached_tokens"] for reply in replies),
                    "seconds": seconds,
                }

    def correctness(self) -> Iterator[dict[str, Any]]:
        for case in measure.correctness_plan(self.plan.sizes, self.plan.name, self.plan.chunk):
            row = self.compare(case)
            error = row["hit_vs_cold"]["max_abs"]
            self.say(f"correctness {case.name}: cached {row['cached']}, max |dlogp| {error:.2e}")
            yield row

    def compare(self, case: Case) -> dict[str, Any]:
        ratio = case.ratio if self.plan.name != "stock" else None
        suffix = self.ids((Segment(f"case/{case.name}/suffix", self.plan.sizes.suffix),))
        self.flush()
        context, matched = self.prime(case, ratio)
        hit = self.look(context + suffix, ratio)
        self.flush()
        cold = self.look(context + suffix, ratio)
        control = self.look(self.ids((Segment(f"case/{case.name}/control", len(context)),)) + suffix, ratio)
        return {
            **{"name": case.name, "how": case.how, "ratio": case.ratio, "matched": matched},
            **cache_facts(hit),
            "cold_cached": cache_facts(cold)["cached"],
            "hit_vs_cold": compare_replies(hit, cold),
            "control_vs_cold": compare_replies(control, cold),
            "hit_first": positions(hit)[0],
            "cold_first": positions(cold)[0],
        }

    def prime(self, case: Case, ratio: float | None) -> tuple[list[int], int]:
        """Put a context into the cache. Returns it, and how many of its tokens a request that goes on from it has to
        find. The stock engine gets a request that ends exactly there, so that it owns a state at the boundary."""
        prefix = self.ids((Segment(f"case/{case.matched}/prefix", case.matched),))
        context, expected = prefix, len(prefix)
        if case.how == "generated":
            context = prefix + self.ask(prefix, 40, ratio)["output_ids"][:20]
            expected = len(context)
        if case.how == "turns":
            context = self.chat(prefix, ratio)
            expected = len(context) - 1  # the last token of an answer has no KV unless one more step was under way
        if case.how == "prefix" and ratio is not None:
            self.ask(prefix + self.ids((Segment(f"case/{case.name}/other", self.plan.sizes.suffix),)), 1, ratio)
        if ratio is None:
            self.ask(context)
        return context, expected

    def chat(self, prefix: list[int], ratio: float | None) -> list[int]:
        context = prefix
        for turn in range(2):
            if turn:
                context = context + self.ids((Segment("case/question", 100),))
            context = context + self.ask(context, 16, ratio)["output_ids"]
        return context

    def look(self, ids: list[int], ratio: float | None) -> Any:
        probes = sorted(set(self.ids(PROBES)))
        return self.ask(ids, NEW_TOKENS, ratio, return_logprob=True, top_logprobs_num=20, token_ids_logprob=probes)


SUMMARIES = {
    "capacity": lambda rows: rows[0],
    "ttft": measure.summarise_ttft,
    "throughput": measure.summarise_throughput,
    "correctness": lambda rows: rows,
}


def cache_facts(reply: dict[str, Any]) -> dict[str, int | None]:
    meta = reply["meta_info"]
    return {
        "cached": meta["cached_tokens"],
        "replayed": measure.plugin_int(meta, "replayed"),
        "generation": measure.plugin_int(meta, "generation"),
    }


def compare_replies(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return measure.difference(a["output_ids"], b["output_ids"], positions(a), positions(b))._asdict()


def positions(reply: dict[str, Any]) -> list[dict[int, float]]:
    meta = reply["meta_info"]
    both = zip(meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True)
    return [{token: logprob for logprob, token, _ in [*top, *probes]} for top, probes in both]


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
        result = SUMMARIES[section](rows) if rows else None
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


def start_engine(plan: EnginePlan) -> Any:
    import sglang

    return sglang.Engine(**plan.args)


def main(plan_path: str, out_path: str, progress_fd: str) -> int:
    progress = os.fdopen(int(progress_fd), "w", buffering=1)
    os.set_inheritable(progress.fileno(), False)
    plan = EnginePlan.from_json(json.loads(Path(plan_path).read_text()))
    began, used = time.monotonic(), host_used_gib()

    def say(text: str) -> None:
        print(f"[{plan.name} {time.monotonic() - began:5.0f} s] {text}", file=progress, flush=True)

    outcome: dict[str, Any] = {"start_seconds": None, "sections": {}, "error": "the engine did not start"}
    write(out_path, outcome)
    runner = Runner(plan, start_engine(plan), say, used)
    outcome["start_seconds"] = round(time.monotonic() - began, 1)
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
