"""Workloads with shared prefixes against one or more servers, with the same seed, and what each server made of them.

    scripts/workload rag chat --url stock=http://localhost:30000 --url ours=http://localhost:30001

Start the servers with --enable-cache-report. Prompts are random token ids, so any model will do; answers are greedy and
of fixed length. One server is asked at a time; each pass begins with an empty cache. With several servers the report
ends with where the first one wins. --out gets a JSON document, and the same name with .md the tables."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS / "workloads"), str(SCRIPTS / "lib")]

import agents  # noqa: E402
import chat  # noqa: E402
import outcome  # noqa: E402
import programs  # noqa: E402
import rag  # noqa: E402
import replay_trace  # noqa: E402
from client import Client, ServerError  # noqa: E402
from load import Load  # noqa: E402
from origin import origin  # noqa: E402
from outcome import Pass  # noqa: E402

WORKLOADS: dict[str, Callable[..., None]] = {
    "programs": programs.run,
    "agents": agents.run,
    "chat": chat.run,
    "rag": rag.run,
    "trace": replay_trace.run,
}
Passes = dict[tuple[str, str], list[Pass]]  # by workload and server


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("workload", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; all if none is given"
    )
    parser.add_argument("--url", action="append", required=True, metavar="[NAME=]URL", help="may be repeated")
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--scale", action="append", default=[], type=scale, metavar="[WORKLOAD=]X", help="of all prompt lengths"
    )
    parser.add_argument("--rounds", type=int, default=4, help="turns of a conversation, waves of questions")
    parser.add_argument("--repeats", type=int, default=1, help="passes of each workload, each with tokens of its own")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--vocab-size", type=int, default=1000, help="token ids of prompts are below")
    parser.add_argument("--trace", type=Path, default=replay_trace.SAMPLE)
    parser.add_argument("--trace-requests", type=int, help="default: 10 for every round")
    parser.add_argument("--trace-times", action="store_true", help="at the trace's times, not as fast as possible")
    parser.add_argument("--warm-up-rounds", type=int, help="of each workload, before; default: --rounds; 0: none")
    parser.add_argument("--total-seconds", type=float, default=float("inf"), help="begin no workload after so many")
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT"), help="where the checkout has no .git")
    parser.add_argument("--out", type=Path, help="JSON with every request")
    options = parser.parse_args(argv)
    unknown = sorted((set(options.workloads) | {name for name, _ in options.scale if name}) - set(WORKLOADS))
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    options.workloads = options.workloads or list(WORKLOADS)
    return options


def scale(text: str) -> tuple[str | None, float]:
    """Of all workloads, or of one."""
    name, _, factor = text.rpartition("=")
    return name or None, float(factor)


def servers(urls: Sequence[str]) -> dict[str, str]:
    """Name -> URL; the URL is the name of a server without one."""
    named = {}
    for text in urls:
        name, equals, url = text.partition("=")
        if not equals or "://" in name:  # no name, though perhaps a query with a =
            name, url = text, text
        named[name] = url.rstrip("/")
    return named


def order(options: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[int, str, list[str]]]:
    """(repeat, workload, its servers). Servers go first in turns, so that drift of the machine hits all alike."""
    for repeat in range(options.repeats):
        for workload in options.workloads:
            yield repeat, workload, list(names) if repeat % 2 == 0 else list(reversed(names))


def load(name: str, options: argparse.Namespace, seed: str, rounds: int) -> Load:
    scales = dict(options.scale)
    factor = scales.get(name, scales.get(None, 1.0))
    return Load(seed, options.vocab_size, factor, options.concurrency, rounds)


def run_pass(name: str, url: str, options: argparse.Namespace, load: Load) -> Pass:
    """One workload on one server, which starts with an empty cache. ServerError where a request fails."""
    run = WORKLOADS[name]
    if name == "programs":
        programs.import_language()  # which takes seconds that are not the server's
    if name == "trace":
        run = partial(run, path=options.trace, requests=options.trace_requests, timed=options.trace_times)
    client = Client(url, options.new_tokens)
    client.flush()
    begin = time.perf_counter()
    run(client, load)
    return Pass(client.samples, time.perf_counter() - begin)


def warm_up(name: str, url: str, options: argparse.Namespace) -> None:
    rounds = options.rounds if options.warm_up_rounds is None else options.warm_up_rounds
    if rounds:
        options = argparse.Namespace(**{**vars(options), "trace_requests": None})  # as many as rounds ask for
        run_pass(name, url, options, load(name, options, f"warm-up/{options.seed}", rounds))


def measure(options: argparse.Namespace, keep: Callable[[Passes], None]) -> None:
    """All passes. `keep` gets those so far after every workload, and before a ServerError goes on."""
    named, begin = servers(options.url), time.monotonic()
    passes: Passes = {}
    for repeat, workload, turns in order(options, list(named)):
        if time.monotonic() - begin > options.total_seconds:
            return say(f"stopped after {options.total_seconds:.0f} s, before {workload} {repeat + 1}")
        try:
            for server in turns:
                say(f"{time.monotonic() - begin:4.0f} s: {workload} {repeat + 1} on {server} ...")
                if repeat == 0:
                    warm_up(workload, named[server], options)
                once = load(workload, options, f"{options.seed}/{repeat}", options.rounds)
                done = run_pass(workload, named[server], options, once)
                passes.setdefault((workload, server), []).append(done)
        finally:
            keep(passes)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def head(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """Of the document. Its machine is the one that asked."""
    model = next(iter(facts.values()))["model"]
    commit = argparse.Namespace(commit=options.commit, model_shape=None, model_path=model)
    settings = {key: str(value) for key, value in vars(options).items()}
    return {"tool": "workload", **origin("scripts/workload", commit), "settings": settings, "servers": facts}


def results_of(options: argparse.Namespace, names: Sequence[str], passes: Passes) -> dict[str, Any]:
    results = [
        {"workload": workload, "server": server, **outcome.summarise(passes[workload, server])}
        for workload in options.workloads
        for server in names
        if (workload, server) in passes
    ]
    return {"results": results, "where_first_wins": outcome.where_first_wins(results)}


def write(document: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(document))
    out.with_suffix(".md").write_text(outcome.page(document))


def main(argv: Sequence[str] | None = None) -> int:
    options, document, status = parse(argv), {}, 0

    def keep(passes: Passes) -> None:
        document.update(results_of(options, list(facts), passes))
        if options.out:
            write(document, options.out)

    try:
        facts = {name: outcome.memory(url) for name, url in servers(options.url).items()}
        document.update(head(options, facts))
        measure(options, keep)
    except (ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    if document.get("results"):
        tables = (outcome.report(document["results"]), outcome.report_memory(facts))
        print(*tables, "\n".join(document["where_first_wins"]), sep="\n\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
