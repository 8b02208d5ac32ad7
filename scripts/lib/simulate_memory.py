"""Traces through caches of equal bytes, GPU and host together: saved states, tails only, stock's checkpoints.

No model, no GPU: cache_model.py and anchor_model.py say which tokens a cache serves and how a hit begins, hit_model.py
what it takes, with numbers of measured machines (--results, --hits). Requests are served one after the other; queued
times are those of one prefill at a time, first come, first served."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import anchor_model
import block_trace
import equal_memory
import hit_model
from anchor_model import Anchored, Hit, Settings, Tiered
from arguments import CHECKOUT, SCRIPTS, model_config, numbers
from block_trace import Request
from cache_model import Checkpoints, Pools
from distribution import summary
from equal_memory import GIB, Bytes, Held
from hit_model import HitModel
from simulate import SAMPLE, SLOTS_PER_REQUEST
from tables import table
from ttft_model import Tail, queued

from sglang_tailreplay import memory_plan
from sglang_tailreplay.cost import Shape
from sglang_tailreplay.replay_rule import EXACT, KINDS

RESULTS = CHECKOUT / "docs" / "results"
INTERVALS = (1024, 2048, 4096, 8192)


class Row(NamedTuple):
    name: str
    held: Held
    settings: Settings | None  # None: stock
    row_dtype: str | None = None
    anchor_dtype: str | None = None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "simulate memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, default=[SAMPLE], help="the sample if none is given")
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--block", type=int, default=block_trace.MOONCAKE_BLOCK, help="tokens of a block, JSONL files")
    parser.add_argument("--model-shape", default="qwen3.5-4b", help="of scripts/shapes, as in the two documents")
    parser.add_argument("--results", type=Path, help="of scripts/gpu_check: pools, cold prefills")
    parser.add_argument("--hits", type=Path, help="of scripts/bench_ttft: hits, link")
    parser.add_argument("--host-gb", type=float, default=160, help="host memory for the cache, GiB, whoever uses it")
    parser.add_argument("--scale", type=float, default=1.0, help="all memory so many times as large")
    parser.add_argument("--exclusive", action="store_true", help="host tiers without copies of what is on the GPU")
    parser.add_argument("--anchor-share", type=float, default=0.125, help="of the host memory, at most, for states")
    parser.add_argument("--intervals", type=numbers(int), default=INTERVALS)
    parser.add_argument("--anchor-dtypes", type=lambda text: tuple(text.split(",")), default=("fp32", "bf16", "int8"))
    parser.add_argument("--row-dtype", default="fp8", help="of rows; tails only is shown with the model's own, too")
    parser.add_argument("--chunk", type=int, default=16384, help="--chunked-prefill-size")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so many times as fast")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(argv)
    options.results = options.results or RESULTS / f"h200-{options.model_shape}.json"
    options.hits = options.hits or RESULTS / f"h200-{options.model_shape}-ttft.json"
    if options.chunk < 1 or options.speed <= 0 or options.scale <= 0 or options.host_gb <= 0:
        parser.error("--chunk, --speed, --scale and --host-gb must be positive")
    return options


def sizes(shape: Shape, row_dtype: str, anchor_dtype: str) -> Bytes:
    number = memory_plan.NumberBytes(row_dtype=row_dtype)
    token = memory_plan.token_bytes(shape, number)
    anchor = memory_plan.anchor_bytes(shape, number, anchor_dtype)
    return Bytes(token.kv, token.rows, memory_plan.state_slot_bytes(shape, number), anchor)


def capacity(document: dict[str, Any], engine: str) -> dict[str, Any]:
    return document["engines"][engine]["sections"]["capacity"]["result"]


def stock_rows(options: argparse.Namespace, document: dict[str, Any], size: Bytes) -> Iterator[Row]:
    found, scale = capacity(document, "stock"), options.scale
    running = found["settings"]["effective_max_running_requests_per_dp"]
    kv, states = int(found["max_total_num_tokens"] * scale), int(SLOTS_PER_REQUEST * running * scale)
    yield Row("stock, nothing on the host", Held(kv, kv, states), None)
    for share in equal_memory.SPLITS:
        held = equal_memory.stock(kv, states, host_bytes(options), share, size, options.exclusive)
        yield Row(f"stock, {share:.0%} of the host KV", held, None)


def our_rows(options: argparse.Namespace, shape: Shape, document: dict[str, Any]) -> Iterator[Row]:
    host, tokens = host_bytes(options), capacity(document, "tail_replay")["max_total_num_tokens"]
    device, tails = int(tokens * options.scale), Settings(0, Tail(options.ratio), options.chunk)

    def held(interval: int, row_dtype: str, anchor_dtype: str) -> Held:
        size = sizes(shape, row_dtype, anchor_dtype)
        states = int(host * options.anchor_share)
        return equal_memory.tail_replay(device, host, interval, states, size, options.exclusive)

    rows = options.row_dtype
    for row_dtype in dict.fromkeys(("auto", rows)):
        yield Row("tails only", held(0, row_dtype, "fp32"), tails, row_dtype)
    for dtype in options.anchor_dtypes:
        for interval in options.intervals:
            settings = tails._replace(interval=interval)
            yield Row(f"saved states, N = {interval:,}", held(interval, rows, dtype), settings, rows, dtype)
    middle, dtype = sorted(options.intervals)[len(options.intervals) // 2], options.anchor_dtypes[0]
    oldest = tails._replace(interval=middle, by_worth=False)
    yield Row(f"the same, N = {middle:,}, oldest goes", held(middle, rows, dtype), oldest, rows, dtype)


def host_bytes(options: argparse.Namespace) -> int:
    return int(options.host_gb * GIB * options.scale)


def serve(requests: Sequence[Request], row: Row, chunk: int) -> tuple[list[Hit], Anchored | None]:
    if row.settings is None:
        policy, ours = Checkpoints(Pools(row.held.tokens, row.held.states), chunk), None
    else:
        policy = ours = Anchored(row.held.tokens, row.held.states, row.settings)
    cache = Tiered(policy, row.held.device_tokens)
    return [cache.serve(request, number) for number, request in enumerate(requests)], ours


def evaluate(requests: Sequence[Request], row: Row, model: HitModel, options: argparse.Namespace) -> dict[str, Any]:
    served, policy = serve(requests, row, options.chunk)
    alone = [milliseconds(one, row, model) for one in served]
    waited = queued([request.seconds / options.speed for request in requests], alone)
    found = [one for one in served if one.served.hit]
    starts = {kind: sum(one.start == kind for one in found) for kind in KINDS}
    return {
        "name": row.name,
        "row_dtype": row.row_dtype,
        "anchor_dtype": row.anchor_dtype,
        "interval": row.settings.interval if row.settings else None,
        **row.held._asdict(),
        "saved": policy.saved if policy else None,
        "evicted": policy.evicted if policy else None,
        "hits": len(found),
        "hit_tokens": sum(one.served.hit for one in found),
        "exact_hit_tokens": sum(one.served.hit for one in found if row.settings is None or one.start == EXACT),
        "hit_rate": sum(one.served.hit for one in found) / sum(one.served.length for one in served),
        "starts": starts if row.settings else None,
        "replayed_tokens": sum(one.replayed for one in found),
        "replayed_per_hit": sum(one.replayed for one in found) / max(len(found), 1),
        "hit_ms": summary([ms for ms, one in zip(alone, served, strict=True) if one.served.hit]),
        "prefill_ms": summary(alone),
        "queued_ms": summary(waited),
    }


def milliseconds(one: Hit, row: Row, model: HitModel) -> float:
    hit, length = one.served.hit, one.served.length
    if row.settings is None:
        return model.stock(hit, length, one.loaded)
    return model.ours(hit, length, one.replayed, one.loaded, one.anchored)


def report(results: Sequence[dict[str, Any]]) -> str:
    header = ("cache", "rows in", "states in", "KV tokens", "states", "hit rate %", "exact % of it", "replayed a hit")
    header += ("hit p50", "hit p99", "queued p50", "queued p90", "queued p99")
    return table(header, [_cells(result) for result in results])


def _cells(result: dict[str, Any]) -> tuple:
    exact = 100 * result["exact_hit_tokens"] / max(result["hit_tokens"], 1)
    shares = (100 * result["hit_rate"], exact, result["replayed_per_hit"])
    times = (result["hit_ms"]["p50"], result["hit_ms"]["p99"], *result["queued_ms"].values())
    dtypes = (result["row_dtype"], result["anchor_dtype"])
    return (result["name"], *dtypes, result["tokens"], result["states"], *shares, *times)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    document, bench = json.loads(options.results.read_text()), json.loads(options.hits.read_text())
    shape = Shape.from_config(model_config(SCRIPTS / "shapes" / options.model_shape))
    size = sizes(shape, options.row_dtype, "fp32")
    model = hit_model.fit(document, bench, size.kv, size.state)
    requests = block_trace.load(options.traces, options.block)[: options.limit]
    names = ", ".join(path.name for path in options.traces)
    print(f"{names}: {len(requests):,} requests; {options.host_gb:g} GiB of host memory, all x {options.scale:g}\n")
    first, *tiers = [evaluate(requests, row, model, options) for row in stock_rows(options, document, size)]
    results = [first, max(tiers, key=lambda result: result["hit_tokens"])]
    results += [evaluate(requests, row, model, options) for row in our_rows(options, shape, document)]
    print(report(results))
    cost = f"{model.token * 1e3:.1f} us a replayed token, {model.state:.2f} ms a fetched state, a pass of "
    cost += f"{hit_model.SHORT:,} new tokens or fewer {model.short_stock:+.1f} (stock) or {model.short_ours:+.1f}"
    print(f"\nms; {cost}; from {options.hits.name}")
    if options.out:
        head = {"tool": "scripts/simulate memory", "traces": names, "requests": len(requests), "chunk": options.chunk}
        head |= {"model_shape": options.model_shape, "host_gb": options.host_gb, "scale": options.scale}
        head |= {
            "exclusive": options.exclusive,
            "anchor_share": options.anchor_share,
            "row_dtype": options.row_dtype,
            "ratio": options.ratio,
        }
        head |= {"graph_tokens": anchor_model.GRAPH_TOKENS, "speed": options.speed}
        times = asdict(model) | {"results": options.results.name, "hits": options.hits.name}
        options.out.write_text(json.dumps({**head, "model": times, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
