"""Workloads with shared prefixes against one or more servers, with the same seed, and what each server made of them.

    scripts/workload rag chat --url stock=http://localhost:30000 --url ours=http://localhost:30001

Start the servers with --enable-cache-report. Prompts are random token ids, so any model will do; answers are greedy."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS / "workloads"), str(SCRIPTS / "lib")]

import agents  # noqa: E402
import chat  # noqa: E402
import programs  # noqa: E402
import rag  # noqa: E402
import replay_trace  # noqa: E402
from client import Client, Sample, ServerError  # noqa: E402
from distribution import summary  # noqa: E402
from load import Load  # noqa: E402
from tables import table  # noqa: E402

WORKLOADS: dict[str, Callable[..., None]] = {
    "programs": programs.run,
    "agents": agents.run,
    "chat": chat.run,
    "rag": rag.run,
    "trace": replay_trace.run,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("workload", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all if none is given"
    )
    parser.add_argument("--url", action="append", required=True, metavar="[NAME=]URL", help="may be repeated")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--scale", type=float, default=1.0, help="of all prompt lengths")
    parser.add_argument("--rounds", type=int, default=4, help="turns of a conversation, waves of questions")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--vocab-size", type=int, default=1000, help="token ids of prompts are below")
    parser.add_argument("--trace", type=Path, default=replay_trace.SAMPLE)
    parser.add_argument("--trace-requests", type=int, help="default: 10 for every round")
    parser.add_argument("--trace-times", action="store_true", help="at the trace's times, not as fast as possible")
    parser.add_argument(
        "--no-warm-up", action="store_true", help="do not run each workload once with another seed before"
    )
    parser.add_argument("--out", type=Path, help="JSON with every request")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.workloads) - set(WORKLOADS))
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    options.workloads = options.workloads or list(WORKLOADS)
    return options


def servers(urls: Sequence[str]) -> dict[str, str]:
    """Name -> URL; the URL is the name of a server without one."""
    named = {}
    for text in urls:
        name, equals, url = text.partition("=")
        if not equals or "://" in name:  # no name, though perhaps a query with a =
            name, url = text, text
        named[name] = url.rstrip("/")
    return named


def runner(name: str, options: argparse.Namespace) -> Callable[[Client, Load], None]:
    run = WORKLOADS[name]
    if name != "trace":
        return run
    return partial(run, path=options.trace, requests=options.trace_requests, timed=options.trace_times)


def measure(name: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One workload on one server, which starts with an empty cache. ServerError where a request fails."""
    if name == "programs":
        programs.import_language()  # which takes seconds that are not the server's
    run = runner(name, options)
    common = {"vocab_size": options.vocab_size, "scale": options.scale}
    common |= {"rounds": options.rounds, "concurrency": options.concurrency}
    if not options.no_warm_up:
        run(Client(url, options.new_tokens), Load(f"warm-up/{options.seed}", **common))
    client = Client(url, options.new_tokens)
    client.flush()
    begin = time.perf_counter()
    run(client, Load(options.seed, **common))
    return {**summarise(client.samples, time.perf_counter() - begin), "samples": [s._asdict() for s in client.samples]}


def summarise(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    prompt, cached, new = (sum(getattr(s, field) for s in samples) for field in ("prompt", "cached", "new"))
    return {
        "requests": len(samples),
        "prompt_tokens": prompt,
        "hit_tokens": cached,
        "replayed_tokens": sum(s.replayed for s in samples),
        "new_tokens": new,
        "seconds": seconds,
        "tokens_per_second": (prompt + new) / seconds,
        "ttft_ms": summary([s.ttft_ms for s in samples]),
    }


def memory(url: str) -> dict[str, Any]:
    """Device memory for KV and the number of state slots, as /server_info tells them."""
    info = Client(url, 0).info()
    state = (info.get("internal_states") or [{}])[0]
    usage = state.get("memory_usage") or {}
    return {
        "backend": state.get("radix_cache_backend") or "stock",
        "kv_gib": usage.get("kvcache"),
        "kv_slots": usage.get("token_capacity"),
        "state_slots": state.get("max_mamba_cache_size"),
        "running_requests": state.get("effective_max_running_requests_per_dp"),
    }


def report(results: Sequence[dict[str, Any]]) -> str:
    header = ("workload", "server", "requests", "prompt tokens", "hit tokens", "hit %", "replayed")
    header += ("TTFT p50", "p90", "p99", "tokens/s")
    return table(header, [_cells(result) for result in results])


def _cells(result: dict[str, Any]) -> tuple:
    share = 100 * result["hit_tokens"] / result["prompt_tokens"]
    counts = (result["requests"], result["prompt_tokens"], result["hit_tokens"], share, result["replayed_tokens"])
    return (result["workload"], result["server"], *counts, *result["ttft_ms"].values(), result["tokens_per_second"])


def report_memory(facts: dict[str, dict[str, Any]]) -> str:
    header = ("server", "cache", "KV GiB", "KV slots", "state slots", "running requests")
    return table(header, [(name, *fact.values()) for name, fact in facts.items()])


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    named, results = servers(options.url), []
    try:
        facts = {name: memory(url) for name, url in named.items()}
        for workload in options.workloads:
            for server, url in named.items():
                print(f"{workload} on {server} ...", file=sys.stderr, flush=True)
                results.append({"workload": workload, "server": server, **measure(workload, url, options)})
    except (ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report(results), "", report_memory(facts), sep="\n")
    if options.out:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings, "servers": facts, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
