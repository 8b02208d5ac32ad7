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


def begin_within(
    m: int,
    k: int,
    most: int,
    reach: int,
    anchors: Iterable[int],
    whole: Callable[[int], bool],
    least_tail: Callable[[int, int], int | None],
) -> Begin | None:
    """As `begin`, but a replay that is not exact leaves out no more than a bound allows. None if that cannot be had.

    `least_tail(k, most)`: the shortest tail of k to `most` tokens that stays within the bound, None if none does.
    Where the tail has to grow, an anchor within the longer tail makes the replay exact, too; so does one within `most`
    where no tail of that many tokens is enough.
    """
    assert k <= most <= m, (m, k, most)
    anchors = list(anchors)
    chosen = begin(m, k, reach, anchors, whole)
    if chosen.kind == EXACT:
        return chosen
    rows = most if whole(most) else _largest(k, most, whole)
    tail = least_tail(k, rows)
    chosen = begin(m, tail or k, max(reach, tail or rows), anchors, whole)
    return chosen if tail is not None or chosen.kind == EXACT else None


def _largest(low: int, high: int, whole: Callable[[int], bool]) -> int:
    """The largest n of [low, high) for which whole(n); it is for `low`, and for every n below one for which it is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if whole(middle) else (low, middle)
    return low


def boundaries(m: int, reach: int | None, anchors: Iterable[int], blocks: Iterable[int]) -> list[int]:
    """Ends 0 < b < m at which a hit may stay within a bound where m does not, the longest first: ends of `blocks`, and
    where an anchor, or the beginning, is just within reach. `reach` None: all of a prefix is, at m as well."""
    exact = [c + reach for c in (0, *anchors)] if reach is not None else []
    return sorted({b for b in (*exact, *blocks) if 0 < b < m}, reverse=True)
