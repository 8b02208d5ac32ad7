"""Scores against the replay ratio and against fixed tails, with full prefill and a zero state beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quality.answers import FULL, ZERO, plain_of, ratio_of, tail_of
from quality.summary import BENCHMARKS
from sglang_tailreplay.figure import save_figure

MOST_LINES = 8  # that a panel is still read with


def points(variants: Mapping[str, Any]) -> list[tuple[float, float, float, float]]:
    """Replay ratio in percent (zero state: 0), score, and how far its interval reaches below and above."""
    found = []
    for variant, one in variants.items():
        ratio = 0.0 if variant == ZERO else ratio_of(variant)
        if ratio is not None:
            score = one["score"]
            found.append((ratio * 100, score["value"], score["value"] - score["low"], score["high"] - score["value"]))
    return sorted(found)


def tail_points(variants: Mapping[str, Any]) -> list[tuple[float, float, float, float]]:
    """The same of fixed tails, in tokens; none where there are none."""
    scores = {tail_of(variant): one["score"] for variant, one in variants.items() if tail_of(variant)}
    return [(k, s["value"], s["value"] - s["low"], s["high"] - s["value"]) for k, s in sorted(scores.items())]


def plain_points(variants: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Percent of the prefix that is prefilled anew, from zero states, and score."""
    scores = {plain_of(variant): one["score"]["value"] for variant, one in variants.items() if plain_of(variant)}
    return [(ratio * 100, score) for ratio, score in sorted(scores.items())]


def panels(numbers: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Title and lines of each panel: a benchmark's cells at one cut, and their mean. Many cells are drawn by task."""
    found = []
    for cut, of_cut in numbers.items():
        for name, mean in of_cut["benchmarks"].items():
            long, short = BENCHMARKS[name]
            lines = {label: one for label, one in of_cut["cells"].items() if label.startswith(f"{short}-")}
            if len(lines) > MOST_LINES and (pairs := of_cut["paired"].get(name)):
                lines = {task: {"variants": one} for task, one in pairs["tasks"].items()}
            found.append((f"{long}, cut: {cut}", {**lines, "mean": mean}))
    return found


def draw(numbers: Mapping[str, Any], model: str, out: Path) -> Sequence[Path]:
    """Writes out.svg and out.png; nothing where there is nothing to draw."""
    chosen = panels(numbers)
    if not chosen:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(title, lines, points) for title, lines in chosen]
    drawn += [(title, lines, tail_points) for title, lines in chosen if tail_points(lines["mean"]["variants"])]
    figure, all_axes = pyplot.subplots(1, len(drawn), figsize=(3.3 * len(drawn), 3.1), squeeze=False, sharey=True)
    for axes, (title, lines, of) in zip(all_axes[0], drawn, strict=True):
        for label, one in lines.items():
            _line(axes, label, one["variants"], of(one["variants"]))
        axes.set(title=title, ylim=(-0.02, 1.02))
        if of is points:
            axes.set_xlabel("replayed share, % (0: zero states)")
            if extends := plain_points(lines["mean"]["variants"]):
                axes.plot(*zip(*extends, strict=True), "k:", marker="x", markersize=4, label="mean without rows")
        else:
            axes.set_xscale("log")
            axes.set_xlabel("replayed tokens")
        axes.grid(True, alpha=0.25)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7)
    all_axes[0][0].set_ylabel("score; dashed: full prefill")
    figure.suptitle(model)
    return save_figure(figure, out)


def _line(axes: Any, label: str, variants: Mapping[str, Any], measured: Sequence[tuple]) -> None:
    width = 2.5 if label == "mean" else 1.0
    colour = {"color": "k"} if label == "mean" else {}
    if measured:
        places, scores, below, above = zip(*measured, strict=True)
        shown = axes.errorbar(places, scores, (below, above), marker="o", markersize=3, lw=width, label=label, **colour)
        colour = {"color": shown[0].get_color()}
    if FULL in variants:
        axes.axhline(variants[FULL]["score"]["value"], ls="--", lw=width / 2, **colour)
