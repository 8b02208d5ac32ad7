"""The sections of gpu_check on one engine; see engine_runner.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import correctness
import engine_runner
import measure
import report
from engine_runner import cache_facts
from measure import Case, EnginePlan
from prompts import Segment

NEW_TOKENS = 4  # compared per case
PROBES = (Segment("probes", 64),)  # tokens whose log-probability every answer of a case names


class CheckRunner(engine_runner.Runner):
    SUMMARIES = {
        **engine_runner.Runner.SUMMARIES,
        "ttft": report.summarise_ttft,
        "throughput": report.summarise_throughput,
        "correctness": lambda rows: rows,
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


def compare_replies(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return correctness.difference(a["output_ids"], b["output_ids"], positions(a), positions(b))._asdict()


def positions(reply: dict[str, Any]) -> list[dict[int, float]]:
    meta = reply["meta_info"]
    both = zip(meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True)
    return [{token: logprob for logprob, token, _ in [*top, *probes]} for top, probes in both]


def main(plan_path: str, out_path: str, progress_fd: str) -> int:
    plan = EnginePlan.from_json(json.loads(Path(plan_path).read_text()))
    return engine_runner.main(CheckRunner, plan, out_path, progress_fd)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
