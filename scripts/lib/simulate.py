"""Hit rates and predicted times to first token of a trace: reuse at any token against reuse at kept states.

No model, no GPU: cache_model.py says which tokens a cache serves, ttft_model.py what a prefill takes. Pools and times
are those of a measured machine (--results) unless given.

"only hits that pay" is a what-if that no server does: where a replay would take longer than computing the hit, the
prompt is computed. Its hit rate counts what the cache could give."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import block_trace
import cache_model
from arguments import CHECKOUT, numbers
from block_trace import Request
from cache_model import AnyToken, Checkpoints, Pools, Served
from distribution import summary
from tables import table
from ttft_model import Tail, TtftModel, fit, queued

from sglang_tailreplay.figure import save_figure

RESULTS = CHECKOUT / "docs" / "results" / "h200-qwen3.5-4b.json"
SAMPLE = CHECKOUT / "scripts" / "traces" / "mooncake-conversation-sample.jsonl"
SLOTS_PER_REQUEST = 3  # state slots that stock SGLang keeps per running request under its no_buffer strategy
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the pools, for the curve


class Row(NamedTuple):
    """One policy over one pair of pools."""

    name: str
    policy: str  # none, checkpoints, any token, paying
    pools: Pools


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, default=[SAMPLE], help="the sample if none is given")
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--block", type=int, default=block_trace.MOONCAKE_BLOCK, help="tokens of a block, JSONL files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="document of scripts/gpu_check")
    parser.add_argument("--kv-tokens", type=int, help="KV pool of tail replay")
    parser.add_argument("--stock-kv-tokens", type=int)
    parser.add_argument("--stock-states", type=int, help="states that stock SGLang keeps")
    parser.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--min-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int)
    for name in asdict(TtftModel(0, 0, 0, 0, 0)):
        parser.add_argument(f"--{name.replace('_', '-')}-ms", type=float, help="of the time model; fitted to --results")
    parser.add_argument("--shares", type=numbers(float), default=SHARES, help="of both pools, for the curve")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals so many times as fast")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--plot", type=Path, help="figure of hit rate against pool size, .svg and .png")
    options = parser.parse_args(argv)
    if options.chunk < 1 or options.speed <= 0:
        parser.error("--chunk and --speed must be positive")
    return options


def pools_of(options: argparse.Namespace, document: dict[str, Any]) -> tuple[Pools, Pools]:
    """Stock's and tail replay's: given, or those of the measured engines."""

    def capacity(engine: str) -> dict[str, Any]:
        return document["engines"][engine]["sections"]["capacity"]["result"]

    running = capacity("stock")["settings"]["effective_max_running_requests_per_dp"]
    stock = Pools(
        options.stock_kv_tokens or capacity("stock")["max_total_num_tokens"],
        options.stock_states or SLOTS_PER_REQUEST * running,
    )
    return stock, Pools(options.kv_tokens or capacity("tail_replay")["max_total_num_tokens"])


def model_of(options: argparse.Namespace, document: dict[str, Any]) -> TtftModel:
    fitted = asdict(fit(document))
    given = {name: getattr(options, f"{name}_ms") for name in fitted}
    return TtftModel(**{name: fitted[name] if value is None else value for name, value in given.items()})


def rows_of(stock: Pools, ours: Pools) -> list[Row]:
    return [
        Row("nothing cached", "none", Pools(0, 0)),
        Row("checkpoints, stock's pools", "checkpoints", stock),
        Row("checkpoints, no limits", "checkpoints", Pools(None, None)),
        Row("any token, stock's KV pool", "any token", Pools(stock.kv_tokens)),
        Row("any token, tail replay's KV pool", "any token", ours),
        Row("the same, only hits that pay", "paying", ours),
        Row("any token, no limits", "any token", Pools(None)),
    ]


def serve(requests: Sequence[Request], row: Row, chunk: int) -> list[Served]:
    if row.policy == "checkpoints":
        return cache_model.simulate(requests, Checkpoints(row.pools, chunk))
    return cache_model.simulate(requests, AnyToken(row.pools))


def times(served: Sequence[Served], row: Row, model: TtftModel, tail: Tail) -> list[float]:
    if row.policy in ("none", "checkpoints"):
        return [model.prefill(one.hit, one.length) for one in served]
    replayed = [model.replayed(one.hit, one.length, tail.of(one.hit)) for one in served]
    if row.policy == "any token":
        return replayed
    return [min(ms, model.prefill(0, one.length)) for ms, one in zip(replayed, served, strict=True)]


def hit_rate(served: Sequence[Served]) -> float:
    return sum(one.hit for one in served) / sum(one.length for one in served)


def evaluate(requests: Sequence[Request], row: Row, model: TtftModel, options: argparse.Namespace) -> dict[str, Any]:
    served = serve(requests, row, options.chunk)
    alone = times(served, row, model, Tail(options.ratio, options.min_tokens, options.max_tokens))
    waited = queued([request.seconds / options.speed for request in requests], alone)
    return {
        "name": row.name,
        "policy": row.policy,
        "kv_tokens": row.pools.kv_tokens,
        "state_slots": row.pools.state_slots,
        "prompt_tokens": sum(one.length for one in served),
        "hit_tokens": sum(one.hit for one in served),
        "hit_rate": hit_rate(served),
        "requests_with_hit": sum(one.hit > 0 for one in served) / len(served),
        "prefill_ms": summary(alone),
        "queued_ms": summary(waited),
    }


def curve(requests: Sequence[Request], stock: Pools, ours: Pools, options: argparse.Namespace) -> Iterator[dict]:
    """Hit rates under shares of the pools."""
    for share in options.shares:
        small = Pools(int(stock.kv_tokens * share), max(int(stock.state_slots * share), 1))
        for row in (
            Row("checkpoints", "checkpoints", small),
            Row("any token, same KV pool", "any token", Pools(small.kv_tokens)),
            Row("any token, tail replay's KV pool", "any token", Pools(int(ours.kv_tokens * share))),
        ):
            served = serve(requests, row, options.chunk)
            yield {"share": share, "name": row.name, "kv_tokens": row.pools.kv_tokens, "hit_rate": hit_rate(served)}


def report(results: Sequence[dict[str, Any]]) -> str:
    header = ("cache", "KV tokens", "states", "hit rate %", "with a hit %", *(f"prefill p{p}" for p in (50, 90, 99)))
    header += tuple(f"queued p{p}" for p in (50, 90, 99))
    return table(header, [_cells(result) for result in results])


def _cells(result: dict[str, Any]) -> tuple:
    unlimited = "no limit"
    states = "-" if result["policy"] != "checkpoints" else result["state_slots"] or unlimited
    pool = unlimited if result["kv_tokens"] is None else result["kv_tokens"]
    shares = (100 * result["hit_rate"], 100 * result["requests_with_hit"])
    return (result["name"], pool, states, *shares, *result["prefill_ms"].values(), *result["queued_ms"].values())


def draw(points: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(point["name"] for point in points):
        line = [point for point in points if point["name"] == name]
        rates = [100 * point["hit_rate"] for point in line]
        axes.plot([point["share"] for point in line], rates, marker="o", markersize=3, label=name)
    axes.set(xlabel="share of the measured machine's pools", ylabel="hit rate, % of prompt tokens", xscale="log")
    axes.set_title(title, fontsize=9)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    save_figure(figure, out)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    document = json.loads(options.results.read_text())
    requests = block_trace.load(options.traces, options.block)[: options.limit]
    stock, ours = pools_of(options, document)
    model = model_of(options, document)
    results = [evaluate(requests, row, model, options) for row in rows_of(stock, ours)]
    names = ", ".join(path.name for path in options.traces)
    print(f"{names}: {len(requests):,} requests over {requests[-1].seconds / options.speed:,.0f} s; times in ms\n")
    print(report(results))
    print(
        f"\ntimes: prefill of [m, n) {model.fixed:.1f} + {model.linear:.5f} (n - m) + {model.square:.3g} (n^2 - m^2), "
        f"a hit {model.replay_fixed:.1f} + {model.replay_token:.5f} k more, from {options.results.name}"
        "\nprefill: each request alone. queued: one prefill at a time, first come, first served; decoding takes no time"
    )
    points = list(curve(requests, stock, ours, options)) if options.plot or options.out else []
    if options.out:
        head = {"traces": names, "requests": len(requests), "chunk": options.chunk, "speed": options.speed}
        times_model = asdict(model) | {"results": options.results.name, "ratio": options.ratio}
        options.out.write_text(json.dumps({**head, "model": times_model, "rows": results, "curve": points}, indent=1))
    if options.plot:
        draw(points, f"{names}: {len(requests):,} requests, chunks of {options.chunk:,}", options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
