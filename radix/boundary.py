"""Which boundary of a match can be used: the longest one whose whole tail has rows. Pure integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ROWS_MISSING, GENERATION, RESIDUAL = "rows_missing", "generation", "residual"


class Shrunk(NamedTuple):
    """A hit whose boundary was made smaller."""

    matched: int  # the boundary that the tree had
    usable: int
    # ROWS_MISSING; GENERATION: too many replays behind the tokens that follow; RESIDUAL: too much of a state would lack
    reason: str


def usable_boundary(valid: np.ndarray, tail_length: Callable[[int], int]) -> int:
    """Longest boundary b <= len(valid) whose tail [b - tail_length(b), b) is all valid; 0 if there is none.

    valid: [m] bool, whether the i-th matched token has a row. tail_length must not decrease, and must not grow faster
    than its argument; then within a run of valid tokens the end of the run is the boundary most likely to fit.
    """
    for begin, end in reversed(_runs(valid)):
        if tail_length(end) <= end - begin:
            return end
    return 0


def _runs(valid: np.ndarray) -> list[tuple[int, int]]:
    """The maximal half-open runs [begin, end) of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], valid, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
