"""Figures of scripts and commands, as files. matplotlib is imported where a figure is drawn, for few processes draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_figure(figure: Any, out: Path) -> list[Path]:
    """Write a figure of pyplot as `out` with the endings .svg and .png, and close it. Returns the paths."""
    from matplotlib import pyplot

    figure.tight_layout()
    written = [out.with_suffix(suffix) for suffix in (".svg", ".png")]
    for path in written:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return written
