"""The residual of a hit, and where a hit must begin and end to keep it within --tail-replay-max-residual.

    residual   the largest share of any head's missing state that a replay leaves out; 0 where nothing is missing

A tail that is replayed on a zero state misses what lies before it in every recurrent state; one that is replayed on an
older state, what lies between the two. Over the tail a head's gates let it keep exp(sum of its log-gates) of that, and
the rest of the delta rule never makes it more: I - beta k k^T has no eigenvalue beyond 1 in size for keys of length 1
and beta from 0 to 2. So because of what was missing no head's state is off by more, in norm, than this share of it.

What follows from that within the tail is not covered: its first three tokens see an empty convolution window, and a
layer that is not the first of its group is fed by one whose state is off. How large both are depends on the model; what
answers lose is measured (`calibrate`, the online guard), not bounded.

The gates are those of the passes that computed the tokens. All on the host, before the replay: see radix/decays.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from sglang_tailreplay.radix.decays import RUN, Decays
from sglang_tailreplay.radix.rows import NO_ROW
from sglang_tailreplay.replay_rule import EXACT, Begin, begin_within, boundaries

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_tailreplay.radix.component import TailReplayComponent

BLOCKS_TRIED = 16  # ends of runs at which a hit is tried that cannot be served where it ends
TailLength = Callable[[int], int]


class Prefix:
    """The rows of a prefix of m tokens on the path to a node, which ends at token `end`."""

    def __init__(self, rows: TailReplayComponent, node: UnifiedTreeNode, end: int, m: int):
        self._rows, self._node, self._beyond = rows, node, end - m
        self.m = m
        self._ids = np.empty(0, dtype=np.int64)

    def ids(self, n: int) -> np.ndarray:
        """[n] of its last n <= m tokens."""
        if n > len(self._ids):
            # Longer ones are likely to be asked for next.
            n_read = min(self.m, max(n, 2 * len(self._ids)))
            self._ids = self._rows.tail(self._node, n_read + self._beyond).rows[:n_read]
        return self._ids[len(self._ids) - n :]

    def whole(self, n: int) -> bool:
        """Whether its last n tokens all have rows."""
        return not (self.ids(n) == NO_ROW).any()


class ResidualBound:
    """One per scheduler."""

    def __init__(
        self, decays: Decays, largest: float, most: int | None, reach: int, look: Callable[[], None] = lambda: None
    ):
        """largest: the residual that a hit may have, in (0, 1]. `most`: tokens of the longest tail, None: all.
        `reach`: tokens that a replay from an anchor may have, 0 without anchors. `look`: note which sums are there."""
        self.decays = decays
        self.largest = largest
        self._limit, self._most, self._reach, self._look = math.log(largest), most, reach, look
        self._decided: dict[tuple[int, int, int], Begin] = {}

    def pass_begins(self) -> None:
        """Matches that led to the pass have been planned."""
        self._decided.clear()

    def begin(self, prefix: Prefix, k: int, anchors: Collection[int]) -> Begin | None:
        """Where the replay of a hit on the prefix begins whose usual tail is k, whole; anchors c <= m, newest first.
        None if no replay is within the bound.

        What was said of a match is said again when the match is planned, whatever sums have arrived in between: runs
        are read otherwise then, and rounded otherwise.
        """
        key = (prefix.m, k, int(prefix.ids(1)[0]))
        said = self._decided.get(key)
        if said is not None and prefix.whole(said.tail) and (said.anchor is None or said.anchor in anchors):
            return said
        found = self._begin(prefix, k, anchors)
        if found is not None:
            self._decided[key] = found
        return found

    def _begin(self, prefix: Prefix, k: int, anchors: Collection[int]) -> Begin | None:
        m = prefix.m
        most = min(m, max(k, self._most or m))

        def least_tail(low: int, high: int) -> int | None:
            # One token more, to know which part of a run lies within.
            return self.decays.least_tail(prefix.ids(min(m, high + 1)), low, high, self._limit)

        return begin_within(m, k, most, max(k, self._reach), anchors, prefix.whole, least_tail)

    def boundary(
        self,
        rows: TailReplayComponent,
        node: UnifiedTreeNode,
        end: int,
        m: int,
        tail_length: TailLength,
        anchors: Collection[int],
    ) -> int:
        """The longest boundary tried, at most m, at which a hit is within the bound; 0 if none is.

        The node ends at token `end`, and the tail of m is whole. Tried are m, the ends of the last 16 runs of up to 64
        tokens before it where they may do better, and boundaries just within reach of an anchor, or of the beginning.
        """
        self._look()
        anchors = [c for c in anchors if c <= m]
        prefix = Prefix(rows, node, end, m)
        if self.begin(prefix, tail_length(m), anchors) is not None:
            return m
        last = prefix.ids(min(m, BLOCKS_TRIED * RUN))
        blocks = [m - len(last) + b for b in self.decays.begins(last, BLOCKS_TRIED)]
        hole = self._last_hole(prefix)
        if hole is not None:
            # Ends behind it have less of the tail that was not enough, and a long one takes milliseconds to read.
            blocks = [b for b in blocks if b <= hole]
        reach = None if self._most is None else max(self._reach, self._most)
        for b in boundaries(m, reach, anchors, blocks):
            shorter, k = Prefix(rows, node, end, b), tail_length(b)
            if shorter.whole(k) and self.begin(shorter, k, [c for c in anchors if c <= b]) is not None:
                return b
        return 0

    def _last_hole(self, prefix: Prefix) -> int | None:
        """The last token without a row of those that a tail may have; None where it may have all it asks for."""
        ids = prefix.ids(min(prefix.m, self._most or prefix.m))
        holes = np.flatnonzero(ids == NO_ROW)
        return prefix.m - len(ids) + int(holes[-1]) if len(holes) else None

    def residual(self, prefix: Prefix, kind: str, tail: int) -> float:
        """Of a replay of that kind, whose tail is at least as long as `begin` said."""
        if kind == EXACT:
            return 0.0
        return min(self.largest, math.exp(self.decays.log_kept(prefix.ids(min(prefix.m, tail + 1)), tail)))
