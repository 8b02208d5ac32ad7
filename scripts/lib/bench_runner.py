"""The sections of bench_ttft on one engine; see engine_runner.py."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_plan
import bench_report
import engine_runner
import gpu_trace
from bench_plan import HOST, BenchPlan, Burst, Request, Served
from prompts import Segment

SETTLE_SECONDS = 0.2  # after a cold prefill: its rows and KV are still on their way to the host
EVICT_SECONDS = 30
PATIENCE = 8  # rejected samples in a row: more would only take time


class BenchRunner(engine_runner.Runner):
    SUMMARIES = {
        **engine_runner.Runner.SUMMARIES,
        "hits": bench_report.summarise_hits,
        "bursts": bench_report.summarise_bursts,
        "trace": list,
    }

    @property
    def kind(self) -> bench_plan.Kind:
        return bench_plan.ENGINES[self.plan.name]

    @property
    def burst_ratio(self) -> float | None:
        return self.plan.sizes.ratios[0] if self.kind.tail_replay else None

    @property
    def first_source(self) -> str | None:
        return self.kind.sources[0] if self.kind.tail_replay else None

    def evict(self) -> None:
        """Push all KV out of the GPU, by a method that eviction_plugin gives to SGLang's scheduler. It refuses while a
        step is in flight, which the last answer does not wait for."""
        deadline = time.monotonic() + EVICT_SECONDS
        while True:
            try:
                return self.engine.collective_rpc("evict_device_cache")
            except AssertionError as error:  # how collective_rpc reports an exception of the method
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the KV did not leave the GPU within {EVICT_SECONDS} s: {error}") from error
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------ sections

    def hits(self) -> Iterator[dict[str, Any]]:
        requests = bench_plan.requests(self.plan.sizes, self.plan.name, self.plan.chunk)
        in_vain = 0
        for number, request in enumerate(requests, start=1):
            sample = self.hit(request)
            if number % 20 == 0 or number == len(requests):
                self.say(f"hits {number}/{len(requests)}: {request.kind} at {request.length}, {sample['ms']:.0f} ms")
            if request.timed:
                yield sample
            in_vain = in_vain + 1 if sample["rejected"] else 0
            if sample["rejected"]:
                self.say(f"hits {number}: REJECTED {sample['rejected']}")
            if in_vain == PATIENCE:
                raise RuntimeError(f"{in_vain} samples in a row were rejected, the last one: {sample['rejected']}")

    def hit(self, request: Request, profile_into: str | None = None) -> dict[str, Any]:
        ids = self.ids(request.prompt)
        if request.source == HOST:
            self.evict()
        with self.profiler(profile_into):
            seconds, reply = self.timed(ids, ratio=request.ratio)
        if request.kind == "cold":
            time.sleep(SETTLE_SECONDS)
        said = served(reply)
        least = bench_plan.least_tail(self.kind, request.length, request.ratio)
        return {
            **{key: getattr(request, key) for key in ("kind", "length", "ratio", "source")},
            "ms": seconds * 1e3,
            **said._asdict(),
            "rejected": bench_plan.rejection(request.kind, request.length, request.source, least, said),
        }

    @contextmanager
    def profiler(self, folder: str | None) -> Iterator[None]:
        """SGLang's torch profiler in the scheduler process; nothing where folder is None."""
        if folder is None:
            yield
            return
        self.engine.start_profile(output_dir=folder, activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
        try:
            yield
        finally:
            self.engine.stop_profile()

    def bursts(self) -> Iterator[dict[str, Any]]:
        for burst in bench_plan.bursts(self.plan.sizes):
            if burst.variant != "prime" and self.first_source == HOST:
                self.evict()
            sample = self.engine.loop.run_until_complete(self.burst(burst))
            if burst.variant == "prime":
                time.sleep(SETTLE_SECONDS)
            if sample["rejected"]:
                self.say(f"bursts: REJECTED {sample['rejected']}")
            if burst.timed:
                self.say(f"bursts: {len(burst.prompts)} at once, {burst.variant}: {sample['seconds'] * 1e3:.0f} ms")
                yield sample

    async def burst(self, burst: Burst) -> dict[str, Any]:
        prompts = [self.ids(prompt) for prompt in burst.prompts]
        start = time.perf_counter()
        answers = await asyncio.gather(*(self.stream(ids, start) for ids in prompts))
        seconds = time.perf_counter() - start
        said = [served(reply) for _, reply in answers]
        return {
            "variant": burst.variant,
            "source": self.first_source,
            "ttft_ms": [first * 1e3 for first, _ in answers],
            "seconds": seconds,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": sum(reply["meta_info"]["completion_tokens"] for _, reply in answers),
            "cached": [one.cached for one in said],
            "rejected": bench_plan.burst_rejection(self.kind, burst, self.first_source, self.burst_ratio, said),
        }

    async def stream(self, ids: list[int], start: float) -> tuple[float, Any]:
        """Seconds from `start` to the first token, and the whole answer."""
        sampling = self.sampling(self.plan.sizes.burst_new_tokens, self.burst_ratio)
        first, reply = None, None
        async for part in await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            first, reply = first or time.perf_counter() - start, part
        return first, reply

    def trace(self) -> Iterator[dict[str, Any]]:
        """One hit at the shortest prefix and one at the longest, with the largest ratio."""
        lengths, ratio = self.plan.sizes.lengths, max(self.plan.sizes.ratios)
        for length in sorted({min(lengths), max(lengths)}):
            yield self.traced_hit(length, ratio if self.kind.tail_replay else None)

    def traced_hit(self, length: int, ratio: float | None) -> dict[str, Any]:
        """Two hits before it warm up what runs for the first time. KV is pushed out before the profiler starts: that
        is no part of the hit."""
        prefix = Segment(f"trace/prefix/{length}", length)
        self.ask(self.ids((prefix, Segment("trace/prime", self.plan.sizes.suffix))))
        time.sleep(SETTLE_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            for number in range(3):
                prompt = (prefix, Segment(f"trace/{number}", self.plan.sizes.suffix))
                request = Request("hit", length, ratio, self.first_source, prompt, timed=True)
                sample = self.hit(request, profile_into=folder if number == 2 else None)
                if sample["rejected"]:
                    raise RuntimeError(f"the hit to be traced was none: {sample['rejected']}")
            (raw,) = Path(folder).glob("*.trace.json.gz")
            events = gpu_trace.gpu_events(gpu_trace.load(raw))
        path = bench_plan.trace_file(self.plan.trace, length)
        size = gpu_trace.save(events, path)
        self.say(f"trace: {len(events['traceEvents'])} events, {size / 1e6:.1f} MB in {path}")
        return {"file": path.name, "bytes": size, **sample}


def served(reply: dict[str, Any]) -> Served:
    facts = engine_runner.cache_facts(reply)
    tiers = reply["meta_info"].get("cached_tokens_details") or {}
    return Served(facts["cached"], tiers.get("device", 0), tiers.get("host", 0), facts["replayed"], facts["start"])


def main(plan_path: str, out_path: str, progress_fd: str) -> int:
    plan = BenchPlan.from_json(json.loads(Path(plan_path).read_text()))
    return engine_runner.main(BenchRunner, plan, out_path, progress_fd)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
