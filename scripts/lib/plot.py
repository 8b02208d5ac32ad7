"""Time to first token against matched length, stock SGLang and tail replay, from one document of gpu_check.

Writes ttft-SHAPE.svg and .png beside the document. All kinds of requests are drawn, those where stock wins included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def draw(report: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    for key, points in series(report).items():
        label, style = LINES[key]
        tokens, median, low, high = zip(*points, strict=True)
        (line,) = axes.plot(tokens, median, style, marker="o", markersize=3, label=label)
        axes.fill_between(tokens, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    axes.set(xlabel="prompt tokens (64 of them new)", ylabel="time to first token, ms", yscale="log")
    machine = report["machine"]
    axes.set_title(f"{report['shape']}, random weights, {machine['gpus'][0].split(',')[0]}, SGLang {machine['sglang']}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(out.with_suffix(suffix), dpi=150)
    pyplot.close(figure)


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        report = json.loads(path.read_text())
        out = path.with_name(f"ttft-{report['shape']}.svg")
        draw(report, out)
        print(f"{out} and .png")


if __name__ == "__main__":
    main(sys.argv[1:])
