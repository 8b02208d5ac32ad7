"""The tables of docs/cost-model.md: bytes from the shapes, times fitted to measured requests and held against others.

Prints Markdown; a test holds the page against it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hit_model
from arguments import CHECKOUT, SCRIPTS, model_config
from hit_model import SUFFIX, HitModel
from tables import markdown

from sglang_tailreplay import memory_plan
from sglang_tailreplay.config import ANCHOR_DTYPES
from sglang_tailreplay.cost import Shape, covering_interval, pays_from
from sglang_tailreplay.memory_plan import GIB, NumberBytes

RESULTS = CHECKOUT / "docs" / "results"
SHAPES = ("qwen3.5-4b", "olmo-hybrid-7b", "qwen3.6-27b", "qwen3.5-35b-a3b")
MEASURED = ("qwen3.5-4b", "qwen3.6-27b")  # by both scripts, gpu_check and bench_ttft
INTERVALS = (1024, 4096)
BUDGETS = {"qwen3.5-4b": 20, "qwen3.6-27b": 32}  # GiB for states
SIMULATIONS = ("synthetic", "conversation", "synthetic-27b")  # docs/results/simulation-memory-*.json
SWEPT = (1024, 2048, 4096, 8192)
LENGTHS = (8192, 32768)
RATIO = 0.05


def shape_of(name: str) -> Shape:
    return Shape.from_config(model_config(SCRIPTS / "shapes" / name))


def document(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"h200-{name}.json").read_text())


def model_of(name: str) -> HitModel:
    shape, number = shape_of(name), NumberBytes()
    kv, state = memory_plan.token_bytes(shape, number).kv, memory_plan.state_slot_bytes(shape, number)
    return hit_model.fit(document(name), document(f"{name}-ttft"), kv, state)


def anchor(shape: Shape, dtype: str) -> int:
    return memory_plan.anchor_bytes(shape, NumberBytes(), dtype)


def kib(count: float) -> str:
    return f"{count / 1024:.1f}"


def bytes_table() -> str:
    """What a cached token and a saved state take."""
    header = ["KiB a token", "KV (GPU)", "rows", "rows, fp8 or int8"]
    header += [f"state {dtype}, MiB" for dtype in ANCHOR_DTYPES]
    header += [f"states a token, N = {interval:,}: {' / '.join(ANCHOR_DTYPES)}" for interval in INTERVALS]
    rows = []
    for name in SHAPES:
        shape = shape_of(name)
        token, packed = (memory_plan.token_bytes(shape, NumberBytes(row_dtype=dtype)) for dtype in ("auto", "fp8"))
        row = [name, kib(token.kv), kib(token.rows), kib(packed.rows)]
        row += [f"{anchor(shape, dtype) / 2**20:.1f}" for dtype in ANCHOR_DTYPES]
        row += [" / ".join(kib(anchor(shape, dtype) / n) for dtype in ANCHOR_DTYPES) for n in INTERVALS]
        rows.append(row)
    return markdown(header, rows)


def times_table() -> str:
    """What a token takes to be computed, replayed or brought from the host."""
    rows = []
    for name in MEASURED:
        model, shape = model_of(name), shape_of(name)
        speeds = document(f"{name}-ttft")["speeds"]
        recompute = [f"{model.prefill.prefill(0, m) / m * 1e3:.1f}" for m in LENGTHS]
        least = shape.replay_flops(1) / speeds["tflops"] / 1e6
        fetched = shape.row_bytes(1) / speeds["link_gbs"] / 1e3
        row = [name, *recompute, f"{model.token * 1e3:.1f}", f"{least:.1f}", f"{fetched:.2f}"]
        row += [f"{model.kv_token * 1e3:.2f}", f"{model.state:.2f}", f"{model.state / model.token:.0f}"]
        rows.append([*row, f"{model.ours(8192, 8192 + SUFFIX):.0f}", f"{model.stock(8192, 8192 + SUFFIX):.0f}"])
    header = ["us a token", *(f"computed, {m // 1024}K" for m in LENGTHS), "replayed", "its FLOPs at the peak"]
    header += ["its rows", "its KV", "state fp32, ms", "in replayed tokens", "64 new tokens, ms", "stock, ms"]
    return markdown(header, rows)


def checks(name: str) -> Iterator[tuple[str, int, int, float, float]]:
    """(what, matched, replayed, measured p50, predicted) of requests that the fit did not see, but for stock's."""
    model, bench = model_of(name), document(f"{name}-ttft")
    for row in hit_model.hits(bench, "host"):
        m, k = row["length"], row["replayed"][0]
        yield "hit, KV from the host", m, k, row["ms"]["p50"], model.ours(m, m + SUFFIX, k, m)
    for source, what in (("device", "hit from a saved state"), ("host", "the same, KV from the host")):
        for row in hit_model.hits(bench, source, "anchored"):
            m, k = row["length"], row["replayed"][0]
            yield what, m, k, row["ms"]["p50"], model.ours(m, m + SUFFIX, k, m if source == "host" else 0, True)
    by_length = {one.length: one for one in hit_model.checkpoints(document(name))}
    for one in by_length.values():
        yield "stock's checkpoint", one.matched, 0, one.ms, model.stock(one.matched, one.length)


def checks_table() -> str:
    rows = []
    for name in MEASURED:
        for what, matched, replayed, measured, predicted in checks(name):
            off = f"{predicted / measured - 1:+.0%}"
            rows.append([name, what, f"{matched:,}", f"{replayed:,}", f"{measured:.1f}", f"{predicted:.1f}", off])
    return markdown(["shape", "", "cached", "replayed", "measured ms", "predicted ms", "off"], rows)


def intervals_table() -> str:
    """The least interval that a budget covers, for the KV slots of a measured server."""
    rows = []
    for name, budget in BUDGETS.items():
        shape, model = shape_of(name), model_of(name)
        result = document(name)["engines"]["tail_replay"]["sections"]["capacity"]["result"]
        tokens = result["max_total_num_tokens"]
        for dtype in ANCHOR_DTYPES:
            interval = covering_interval(tokens, anchor(shape, dtype), budget * GIB)
            gap = interval / 2
            ms = f"{gap * model.token + model.state:.1f}"
            rows.append([name, f"{tokens:,}", budget, dtype, interval, f"{gap:,.0f}", ms, pays_from(interval, RATIO)])
    header = ["shape", "KV slots", "GiB of states", "kept as", "least N that covers them", "replayed by a hit, mean"]
    return markdown([*header, "that takes, ms", "less than 5 % from, tokens"], rows)


def sweep_table() -> str:
    """Simulated intervals: what share of the hit tokens was exact, and what a hit replayed."""
    rows, intervals = [], SWEPT
    for name in SIMULATIONS:
        found = json.loads((RESULTS / f"simulation-memory-{name}.json").read_text())
        tails = next(row for row in found["rows"] if row["name"] == "tails only" and row["row_dtype"] != "auto")
        for dtype in ANCHOR_DTYPES:
            saved = [row for row in found["rows"] if row["anchor_dtype"] == dtype and row["name"].startswith("saved")]
            places = max(row["states"] for row in saved)
            by_interval = {row["interval"]: row for row in saved}
            cells = [_swept(by_interval[n]) for n in intervals]
            rows.append([name, dtype, f"{places:,}", *cells, f"{tails['replayed_per_hit']:,.0f}"])
    header = ["trace", "kept as", "places", *(f"N = {n:,}" for n in intervals), "tails only, 5 %"]
    return markdown(header, rows)


def _swept(row: Mapping[str, Any]) -> str:
    return f"{100 * row['exact_hit_tokens'] / row['hit_tokens']:.0f} %, {row['replayed_per_hit']:,.0f}"


def tables() -> Sequence[str]:
    return bytes_table(), times_table(), checks_table(), intervals_table(), sweep_table()


if __name__ == "__main__":
    print("\n\n".join(tables()))
