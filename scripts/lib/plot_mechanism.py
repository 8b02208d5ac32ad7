"""The picture of docs/how-it-works.md: what a hit reuses, replays and computes, layer by layer and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_tailreplay.figure import save_figure

TAIL, BOUNDARY, END = 61.0, 76.0, 92.0  # tokens, of 100: m - k, m, n
GROUPS = 3
HEIGHT, ATTENTION, ROWS, GAP = 1.0, 0.55, 0.22, 0.12
KV, REPLAY, PREFILL, STORED, STATE = "#9ecae1", "#fdae6b", "#a1d99b", "#9e9ac8", "#cb181d"


def draw(out: Path) -> list[Path]:
    """Writes `out` with the endings .svg and .png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the bytes
        figure, axes = pyplot.subplots(figsize=(9.5, 4.9))
        y = 0.0
        for group in range(GROUPS):
            y = _group(axes, y, group)
            y = _attention(axes, y)
        _tokens(axes, y)
        axes.set(xlim=(-25, END + 1), ylim=(-1.75, y + 0.75))
        axes.axis("off")
        return save_figure(figure, out)


def _box(
    axes: Any, y: float, height: float, begin: float, end: float, colour: str, text: str = "", alpha: float = 1
) -> None:
    """Layers `y` to `y + height` of tokens [begin, end)."""
    style = {"color": colour, "edgecolor": "white", "linewidth": 0.6, "alpha": alpha}
    axes.barh(y, end - begin, height, begin, align="edge", **style)
    axes.text((begin + end) / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def _name(axes: Any, y: float, height: float, text: str) -> None:
    axes.text(-1, y + height / 2, text, ha="right", va="center", fontsize=8)


def _group(axes: Any, y: float, group: int) -> float:
    """A group and what enters it, from `y` upwards. Returns where the next layer begins."""
    what = "rows: hidden states\non the host" if group else "token ids"
    _name(axes, y, ROWS, what)
    _box(axes, y, ROWS, 0, TAIL, STORED if group else "#d9d9d9", alpha=0.45)
    _box(axes, y, ROWS, TAIL, BOUNDARY, STORED if group else "#bdbdbd")
    y += ROWS
    axes.annotate("", ((TAIL + BOUNDARY) / 2, y + 0.34), ((TAIL + BOUNDARY) / 2, y), arrowprops={"arrowstyle": "-|>"})
    _name(axes, y, HEIGHT, f"group {group}:\nGated DeltaNet layers")
    _box(axes, y, HEIGHT, 0, TAIL, "#f7f7f7", "no state was kept, none is computed")
    _box(axes, y, HEIGHT, TAIL, BOUNDARY, REPLAY, "replayed")
    _box(axes, y, HEIGHT, BOUNDARY, END, PREFILL, "prefilled")
    axes.plot([BOUNDARY], [y + HEIGHT / 2], marker="o", color=STATE, markersize=9, zorder=5)
    return y + HEIGHT + GAP


def _attention(axes: Any, y: float) -> float:
    _name(axes, y, ATTENTION, "full attention")
    _box(axes, y, ATTENTION, 0, BOUNDARY, KV, "KV from the cache, exact")
    _box(axes, y, ATTENTION, BOUNDARY, END, PREFILL, "prefilled")
    return y + ATTENTION + 2 * GAP


def _tokens(axes: Any, top: float) -> None:
    """The axis of tokens below, and lines at the boundary and where the tail begins."""
    for x, text in ((0, "0"), (TAIL, "m − k"), (BOUNDARY, "m, the boundary"), (END, "n")):
        axes.plot([x, x], [-0.3, top], color="black", linewidth=0.7, linestyle=":" if x in (TAIL, BOUNDARY) else "-")
        axes.text(x, -0.62, text, ha="center", va="center", fontsize=8)
    for begin, end, text in ((0, TAIL, ""), (TAIL, BOUNDARY, "tail, k tokens"), (BOUNDARY, END, "new tokens")):
        axes.text((begin + end) / 2, -1.05, text, ha="center", va="center", fontsize=8)
    axes.text(BOUNDARY / 2, -1.5, "matched prompt tokens [0, m)", ha="center", va="center", fontsize=8)
    axes.annotate("", (BOUNDARY, -1.25), (0, -1.25), arrowprops={"arrowstyle": "<->", "linewidth": 0.7})
    axes.plot([2], [top + 0.35], marker="o", color=STATE, markersize=9)
    axes.text(4, top + 0.35, "recurrent state at m, rebuilt for this hit", ha="left", va="center", fontsize=8)
