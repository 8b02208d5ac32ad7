"""What the operator sees: a table for each anchor interval, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_tailreplay.calibrate.judge import Score
from sglang_tailreplay.calibrate.plan import Cell
from sglang_tailreplay.figure import save_figure


def table(scores: Mapping[Cell, Score]) -> str:
    """One line per cell: what was asked for, what was replayed, and what came of it."""
    head = ("matched to", "tail", "replayed", "exact", "agreement", "95 %", "KL", "worst", "prompts")
    blocks = []
    for interval in sorted({cell.anchor_interval for cell in scores}):
        title = f"anchors every {interval} tokens" if interval else "no anchors"
        chosen = sorted(cell for cell in scores if cell.anchor_interval == interval)
        blocks.append("\n".join([f"{title}:", *_aligned([head, *(_line(cell, scores[cell]) for cell in chosen)])]))
    return "\n\n".join(blocks)


def _line(cell: Cell, found: Score) -> tuple[str, ...]:
    return (
        f"{cell.length:,}",
        f"{cell.tail:,} ({cell.tail / cell.length:.0%})",
        f"{found.replayed:,.0f}",
        f"{found.exact:.0%}",
        f"{found.agreement:.3f}",
        f"{found.low:.3f}-{found.high:.3f}",
        f"{found.kl:.4f}",
        f"{found.kl_worst:.4f}",
        f"{found.prompts}",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def draw(scores: Mapping[Cell, Score], model: str, wanted: float, out: Path) -> list[Path]:
    """Agreement and KL against the asked tail, as out.svg and out.png; none where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    intervals = sorted({cell.anchor_interval for cell in scores})
    figure, axes = pyplot.subplots(2, len(intervals), figsize=(5.5 * len(intervals), 7), squeeze=False, sharey="row")
    for column, interval in enumerate(intervals):
        for length in sorted({cell.length for cell in scores if cell.anchor_interval == interval}):
            _lines(axes[:, column], length, {c: s for c, s in scores.items() if c[:2] == (interval, length)})
        axes[0, column].axhline(wanted, color="k", ls=":", lw=1)
        axes[0, column].set(title=f"anchors every {interval}" if interval else "no anchors", ylim=(-0.02, 1.02))
        axes[1, column].set(xlabel="tail, % of the matched prefix")
        axes[1, column].set_yscale("symlog", linthresh=1e-4)
        for one in axes[:, column]:
            one.grid(True, alpha=0.25)
            one.set_xscale("log")  # what is of interest lies at a few per cent
            one.xaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel("next tokens that agree with cold prefill")
    axes[1, 0].set_ylabel("KL(cold || hit), nats")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle(model)
    return save_figure(figure, out)


def _lines(axes: Any, length: int, found: Mapping[Cell, Score]) -> None:
    chosen = sorted(found)
    shares = [cell.tail / cell.length * 100 for cell in chosen]
    each = [found[cell] for cell in chosen]
    reach = ([s.agreement - s.low for s in each], [s.high - s.agreement for s in each])
    axes[0].errorbar(shares, [s.agreement for s in each], reach, marker="o", ms=3, label=f"{length:,} tokens matched")
    axes[1].plot(shares, [s.kl for s in each], marker="o", ms=3)
