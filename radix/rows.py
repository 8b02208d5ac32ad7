"""Who owns which row of the row store: a pool of row ids, the rows of a running request, the rows of a tree node.

The same of anchors, recurrent states that were saved on the host: an anchor at position p is the state after p tokens.

Pure integers, no torch. A *row* is one token's hidden states, one per group, in the pinned row store; its id is an
index into that store. Every id is owned by exactly one of: the free list, one RequestRows (tokens computed, not yet in
the tree), one RowSpan (the tokens of a tree node). Ownership moves, it is never shared, so rows live exactly as long as
the cached token they belong to, on whatever tier its KV is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import numpy as np

NO_ROW = -1


def no_rows(n: int) -> np.ndarray:
    """[n] int64, every entry NO_ROW."""
    return np.full(n, NO_ROW, dtype=np.int64)


class Anchor(NamedTuple):
    """A saved state."""

    id: int  # its place in the anchor store
    generation: int  # replays behind it; 0: what a cold prefill computes


class RowPool:
    """The free list of a store of `capacity` rows, or anchors."""

    def __init__(self, capacity: int):
        if capacity < 0:
            raise ValueError(f"a row store cannot have {capacity} rows")
        self.capacity = capacity
        # A stack whose top is the end; reversed, so that a fresh store hands out 0, 1, 2, ... in order.
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._free = capacity
        self.version = 0  # rises with every change, so that a check need not be repeated

    @property
    def free_rows(self) -> int:
        return self._free

    @property
    def used_rows(self) -> int:
        return self.capacity - self._free

    def alloc(self, n: int) -> np.ndarray:
        """Up to n row ids, fewer when fewer are free: having no room is normal, the tokens just go without a row."""
        n = min(n, self._free)
        self._free -= n
        self.version += 1
        return self._stack[self._free : self._free + n][::-1].copy()

    def free(self, ids: np.ndarray) -> None:
        """Take back ids; NO_ROW entries are passed over."""
        ids = ids[ids != NO_ROW]
        assert self._free + len(ids) <= self.capacity, ("more rows freed than exist", self._free, len(ids))
        self._stack[self._free : self._free + len(ids)] = ids[::-1]
        self._free += len(ids)
        self.version += 1

    def check_invariants(self, owned: Iterable[np.ndarray]) -> None:
        """Recount from scratch: every id is free or owned, none twice."""
        ids = np.concatenate([self._stack[: self._free], *(ids[ids != NO_ROW] for ids in owned)])
        owners = np.bincount(ids, minlength=self.capacity)
        assert len(owners) == self.capacity, f"row {ids.max()} does not exist, there are {self.capacity}"
        lost, twice = np.flatnonzero(owners == 0), np.flatnonzero(owners > 1)
        assert len(lost) == 0 and len(twice) == 0, f"rows without owner: {lost[:8]}, with several: {twice[:8]}"


class RowSpan:
    """The rows of one tree node: ids[i] belongs to the node's i-th token.

    `generation` counts how many approximate replays lie behind these tokens (0: computed by an exact prefill).
    """

    __slots__ = ("ids", "generation")

    def __init__(self, ids: np.ndarray, generation: int):
        self.ids = ids
        self.generation = generation

    def split(self, n: int) -> RowSpan:
        """Cut off and return the first n tokens."""
        head = RowSpan(self.ids[:n].copy(), self.generation)
        self.ids = self.ids[n:].copy()
        return head


class RequestRows:
    """The rows of the tokens [start, end) of a running request that the tree does not own yet.

    Also carries its anchors by position, the `generation` of what it computes, and what the answer reports: `boundary`
    (matched tokens), `replayed`, whether the replay began at an anchor, `start_kind` (exact, seeded or zero), and
    `answer_generation` and `residual`, the largest behind any token of the answer: a retracted request may start over
    on better ground than its first tokens had. `number` is no other request's.
    """

    __slots__ = (
        *("start", "_ids", "_len", "generation", "answer_generation", "boundary", "replayed"),
        *("anchored", "start_kind", "anchors", "last_anchor", "residual", "number", "__weakref__"),
    )
    _numbers = count()

    def __init__(self, start: int = 0):
        self._ids = no_rows(64)
        self.generation = 0
        self.answer_generation = 0
        self.boundary = 0
        self.replayed = 0
        self.anchored = False
        self.start_kind = ""
        self.residual: float | None = None
        self.number = next(self._numbers)
        self.anchors: dict[int, Anchor] = {}
        self.last_anchor = 0  # position of the newest anchor at or before its end, whoever owns it; 0: none
        self.restart(start)

    @property
    def end(self) -> int:
        return self.start + self._len

    @property
    def ids(self) -> np.ndarray:
        """[end - start] view."""
        return self._ids[: self._len]

    def restart(self, start: int) -> None:
        """Forget all; the caller has freed or moved the ids."""
        self.start = start
        self._len = 0

    def append(self, ids: np.ndarray) -> None:
        needed = self._len + len(ids)
        if needed > len(self._ids):
            grown = no_rows(max(needed, 2 * len(self._ids)))
            grown[: self._len] = self.ids
            self._ids = grown
        self._ids[self._len : needed] = ids
        self._len = needed

    def append_one(self, row: int) -> None:
        """append() for the decode loop, without an array."""
        if self._len == len(self._ids):
            self.append(np.array([row], dtype=np.int64))
            return
        self._ids[self._len] = row
        self._len += 1

    def move(self, begin: int, end: int) -> np.ndarray:
        """Hand over the rows of the tokens [begin, end): [end - begin] ids, NO_ROW where this request has none."""
        moved = no_rows(end - begin)
        # [begin, end) wanted, [self.start, self.end) here
        lo, hi = max(begin, self.start), min(end, self.end)
        if lo < hi:
            here = self._ids[lo - self.start : hi - self.start]
            moved[lo - begin : hi - begin] = here
            here[:] = NO_ROW
        return moved

    def take_anchors(self, begin: int, end: int) -> dict[int, Anchor]:
        """Hand over the anchors at positions begin < p <= end."""
        taken = {p: anchor for p, anchor in self.anchors.items() if begin < p <= end}
        for position in taken:
            del self.anchors[position]
        return taken

    def release_until(self, position: int) -> np.ndarray:
        """Drop the tokens [start, position) and return their ids, for the pool."""
        n = min(max(position - self.start, 0), self._len)
        released = self._ids[:n].copy()
        self._ids[: self._len - n] = self._ids[n : self._len].copy()
        self._len -= n
        self.start += n
        return released

    def release(self) -> np.ndarray:
        """Drop all and return the ids, for the pool."""
        return self.release_until(self.end)
