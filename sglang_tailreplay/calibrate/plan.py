"""What is measured: every setting of a grid at every length. Integers and fractions only.

A hit at boundary m with a tail of k tokens is one cell, whatever settings lead to it. Every setting of the grid is
covered at every length, so that what is recommended was measured, never interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from sglang_tailreplay.replay.tail import tail_length


class Setting(NamedTuple):
    """What a server would be started with."""

    ratio: float
    min_tokens: int
    max_tokens: int | None
    anchor_interval: int  # tokens; 0: no anchors

    def tail(self, matched: int) -> int:
        return tail_length(matched, self.ratio, self.min_tokens, self.max_tokens)


class Cell(NamedTuple):
    """One point of measurement: hits at a boundary of `length` tokens that replay `tail` of them."""

    anchor_interval: int
    length: int
    tail: int


def grid(
    ratios: Sequence[float],
    min_tokens: Sequence[int],
    max_tokens: Sequence[int | None],
    anchor_intervals: Sequence[int],
) -> tuple[Setting, ...]:
    """All combinations that are settings: a maximum below the minimum is none."""
    combined = product(ratios, min_tokens, max_tokens, anchor_intervals)
    return tuple(Setting(*one) for one in combined if one[2] is None or one[2] >= one[1])


def control(length: int) -> Cell:
    """A replay of all rows: exact but for rounding, so what it misses of cold prefill is this machine's noise."""
    return Cell(0, length, length)


def cells(settings: Sequence[Setting], lengths: Sequence[int]) -> dict[int, tuple[Cell, ...]]:
    """By anchor interval, which a server is started with: the cells of all settings, shortest tails last.

    The control cells are among them.
    """
    wanted = {Cell(one.anchor_interval, length, one.tail(length)) for one in settings for length in lengths}
    wanted |= {control(length) for length in lengths}
    intervals = sorted({cell.anchor_interval for cell in wanted})
    return {
        interval: tuple(sorted((c for c in wanted if c.anchor_interval == interval), key=lambda c: (c.length, -c.tail)))
        for interval in intervals
    }


def ratio_for(tail: int, matched: int) -> float:
    """A ratio by which a server whose minimum is no larger replays exactly `tail` of `matched` tokens."""
    if not 1 <= tail <= matched:
        raise ValueError(f"a tail must lie in [1, {matched}], got {tail}")
    return 1.0 if tail == matched else (tail - 0.5) / matched
