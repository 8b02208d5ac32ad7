"""Time to first token against matched length, stock SGLang and tail replay, from documents of gpu_check or bench_ttft.

All kinds of requests are drawn, those where stock wins included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paper
from bench_plan import SAVED
from bench_print import column

from sglang_tailreplay.figure import save_figure

# kind of request, engine, ratio -> label and line style
LINES = {
    ("cold", "stock", None): ("cold prefill, stock", "k-"),
    ("diverge", "stock", None): ("prompt that leaves a cached one, stock", "C3--"),
    ("repeat", "stock", None): ("the same prompt again, stock", "C3:"),
    ("again", "tail_replay", 0.05): ("hit, tail replay r = 5 %", "C0-"),
    ("again", "tail_replay", 0.1): ("hit, tail replay r = 10 %", "C0--"),
    ("cold", "tail_replay", None): ("cold prefill, tail replay", "C7-"),
}


def series(report: dict[str, Any]) -> dict[tuple, list[tuple[int, float, float, float]]]:
    """Line -> (prompt tokens, median, min, max in ms), ascending."""
    lines: dict[tuple, list[tuple[int, float, float, float]]] = {key: [] for key in LINES}
    for engine, outcome in report["engines"].items():
        for row in (outcome["sections"].get("ttft") or {}).get("result") or []:
            key = (row["kind"], engine, row["ratio"])
            if key in lines:
                ms = row["ms"]
                lines[key].append((row["prompt_tokens"], ms["p50"], ms["min"], ms["max"]))
    return {key: sorted(points) for key, points in lines.items() if points}


Point = tuple[int, float, float, float]  # tokens; typical, least and largest ms

STOCK_KINDS = {
    "cold": ("full prefill, stock", "k-"),
    "diverge": ("prompt that leaves a cached one, stock", "C3--"),
    "aligned": ("the same at the end of a chunk, stock", "C3:"),
}
COLOURS = {("device", True): "C0", ("device", False): "C9", ("host", True): "C2", ("host", False): "C8"}
VARIANT_STYLES = {paper.SKIP: "-", paper.OVERLAP: "--", paper.SERIAL: ":", SAVED: "-."}


def check_lines(report: dict[str, Any]) -> list[tuple[str, str, list[Point]]]:
    """Label, style and points of every line, from a document of gpu_check."""
    return [(*LINES[key], points) for key, points in series(report).items()]


def bench_lines(report: dict[str, Any]) -> list[tuple[str, str, list[Point]]]:
    """The same from a document of bench_ttft: means, against the length of the matched prefix."""
    grouped: dict[tuple[str, str], list[Point]] = {}
    for engine, outcome in report["engines"].items():
        for row in (outcome["sections"].get("hits") or {}).get("result") or []:
            line = STOCK_KINDS.get(row["kind"]) if engine == "stock" else None
            if row["kind"] == "cold" and engine != "stock":
                line = (f"full prefill, {engine}", "C7-")
            if line and row["ms"]:
                grouped.setdefault(line, []).append(_point(row))
    for cell in report["cells"]:
        first_ratio = cell["ratio"] == report["sizes"]["ratios"][0]
        colour = COLOURS[cell["source"], first_ratio]
        line = (column(cell), colour + VARIANT_STYLES[cell["variant"]])
        grouped.setdefault(line, []).append(_point(cell))
    return [(label, style, sorted(points)) for (label, style), points in grouped.items()]


def _point(row: dict[str, Any]) -> Point:
    return (row["length"], row["ms"]["mean"], row["ms"]["min"], row["ms"]["max"])


def draw(report: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bench = is_bench(report)
    figure, axes = pyplot.subplots(figsize=(11, 5.5) if bench else (7.5, 4.5))
    for label, style, points in bench_lines(report) if bench else check_lines(report):
        tokens, typical, low, high = zip(*points, strict=True)
        (line,) = axes.plot(tokens, typical, style, marker="o", markersize=3, label=label)
        axes.fill_between(tokens, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    what = "matched tokens" if bench else "prompt tokens"
    new = "of them" if not bench else "more are"
    axes.set(xlabel=f"{what} ({report['sizes']['suffix']} {new} new)", ylabel="time to first token, ms", yscale="log")
    machine = report["machine"]
    gpu = machine["gpus"][0].split(",")[0] if machine["gpus"] else machine["cpu"]
    axes.set_title(f"{Path(report['shape']).name}, random weights, {gpu}, SGLang {machine['sglang']}")
    axes.grid(True, which="both", alpha=0.25)
    # Beside the lines: a document of the bench has too many of them for a place between.
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1)) if bench else axes.legend(fontsize=8)
    save_figure(figure, out)


def is_bench(report: dict[str, Any]) -> bool:
    return report.get("tool") == "bench_ttft"
