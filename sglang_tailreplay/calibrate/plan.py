"""What is measured: every setting of a grid at every length. Integers and fractions only.

A hit at boundary m with a tail of k tokens is one cell, whatever settings lead to it. Every setting of the grid is
covered at every length, so that what is recommended was measured, never interpolated.

Where anchors are measured, the boundaries of a length are not that length itself, which may be a multiple of the
interval and would lie at an anchor: they are spread evenly over the last interval before it, as those of users are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from sglang_tailreplay.config import CONV_WIDTH
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
    """One point of measurement: hits at a boundary of `length` tokens that replay `tail` of them.

    Where boundaries are spread, `length` is the longest, and a shorter one has as much less of a tail."""

    anchor_interval: int
    length: int
    tail: int

    def tail_at(self, m: int) -> int:
        """Of a hit at boundary m <= length."""
        return self.tail if m == self.length else min(m, max(-(-self.tail * m // self.length), CONV_WIDTH))


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


def boundaries(length: int, anchor_intervals: Sequence[int], suffix: int, count: int, seed: int) -> list[int]:
    """Where the hits of `count` prompts of a length begin: evenly spread over (low, length], in any order.

    That is the longest interval that fits into the length, but never so much that a boundary is half of it or less, or
    has no passage of `suffix` tokens before it. Without anchors all of them are the length.
    """
    interval = max((one for one in anchor_intervals if one < length), default=0)
    if interval == 0:
        return [length] * count
    low = max(length - interval, length // 2, suffix)
    rng = random.Random(f"{seed}/{length}/boundaries")
    found = [length - int((i + rng.random()) / count * (length - low)) for i in range(count)]
    rng.shuffle(found)  # what a generated prompt asks for moves through its prefix from prompt to prompt
    return found
