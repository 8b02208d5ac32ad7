"""Where the replay of a hit begins. One rule for every hit, on integers only.

    exact    an anchor c within reach:  state at c, then [c, m)        or all of [0, m), if that is within reach
    seeded   an older anchor c:         state at c, then [m-k, m)      what lies in [c, m-k) is missing
    zero     no anchor:                 zero, then [m-k, m)            what lies in [0, m-k) is missing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

EXACT, SEEDED, ZERO = "exact", "seeded", "zero"
KINDS = (EXACT, SEEDED, ZERO)


class Begin(NamedTuple):
    kind: str
    tail: int  # tokens before the boundary that are replayed
    anchor: int | None  # position of the state that they are replayed on; None: zero


def begin(m: int, k: int, reach: int, anchors: Iterable[int], whole: Callable[[int], bool]) -> Begin:
    """Of a hit on m tokens whose tail of k is whole.

    `reach`: tokens that a replay may have to be exact; at least k. `anchors`: positions c <= m of saved states, the
    newest first. `whole(n)`: whether the last n tokens before m all have rows.
    """
    assert k <= reach and k <= m, (m, k, reach)
    seed = None  # the newest anchor from which m is not reached
    for c in anchors:
        if m - c <= reach and whole(m - c):
            return Begin(EXACT, m - c, c)
        if seed is None:
            seed = c
        if m - c > reach:
            break
    if k == m or (m <= reach and whole(m)):
        return Begin(EXACT, m, None)
    return Begin(ZERO if seed is None else SEEDED, k, seed)
