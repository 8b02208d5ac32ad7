"""How much of their states heads keep over cached tokens: sums of log-gates, one row of numbers per row of a token.

A head's state is multiplied by exp(g) at every token, g <= 0. Over the tokens [b, m) it keeps exp(sum of g) of what it
held at b: the share of a state missing at b that a replay of [b, m) still lacks at m. The largest share of all heads is
what a bound is about; it does not add up over tokens, so the sums of every head are kept.

What is kept for a token is not its own g but the sum over its *run* so far, which is at most RUN tokens of one request:
the sum of a run's last token covers all of the run, so a tail is read in steps of runs, not of tokens, and a prefix may
end at any token of one. Like hidden states, sums arrive some time after their row was given out. Until then they count
as if nothing decayed: what is told is never too small. Pure numpy.

    tokens of a prefix   ... | 63 |  0  1  2  ...  63 |  0  1  ...  63 |  0  1  2 | m       steps into their run
    read for a tail            ^                   ^                ^          ^
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from sglang_tailreplay.radix.rows import NO_ROW

RUN = 64  # most tokens of a run
# Sums are rounded towards zero, to float16, by at most this share of them and this much. What is taken away from
# another one is made as large as it may have been.
ROUNDING, LEAST = 2.0**-9, 1e-6
NEVER = np.iinfo(np.int64).max
_TOGETHER = 16  # runs that are read at once: few hits need more
_CHECKED = 256  # rows whose sums an idle check looks at


class _Run(NamedTuple):
    begin: int  # of the tokens at hand; may lie before them
    end: int


class Decays:
    """Which row has which sums, and whether they are there. One thread."""

    def __init__(self, sums: np.ndarray):
        """`sums` [R, D] float16: memory that somebody else fills; D: the heads of all layers."""
        self._sums = sums
        rows = len(sums)
        self._steps = np.zeros(rows, dtype=np.int64)  # tokens of its run before this one
        self._ticket = np.full(rows, NEVER)  # of the write that brings the row's sums
        self._owner = np.zeros(rows, dtype=np.int64)  # how often the row was given out
        self._written = self._arrived = 0

    def given_out(self, ids: np.ndarray) -> None:
        """The rows belong to other tokens from now on. NO_ROW entries are passed over."""
        ids = ids[ids != NO_ROW]
        self._owner[ids] += 1
        self._ticket[ids] = NEVER

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """[n] int64: whose the rows are, to be told to `written`."""
        return self._owner[ids]

    def written(self, ids: np.ndarray, steps: np.ndarray, owners: np.ndarray) -> int:
        """The sums of these rows were sent; `steps` [n] tokens of its run lie before each. Returns the ticket.

        A row that has another owner by now keeps waiting for the sums of that one.
        """
        ours = (ids != NO_ROW) & (self._owner[ids] == owners)
        self._written += 1
        self._steps[ids[ours]] = steps[ours]
        self._ticket[ids[ours]] = self._written
        return self._written

    def arrived(self, ticket: int) -> None:
        """All sums sent with this ticket, or before, may be read."""
        assert self._arrived <= ticket <= self._written, (self._arrived, ticket, self._written)
        self._arrived = ticket

    def known(self, rows: int | np.ndarray) -> bool | np.ndarray:
        """Whether the sums of a row, or of each of these, may be read."""
        return (rows != NO_ROW) & (self._ticket[rows] <= self._arrived)

    def log_kept(self, ids: np.ndarray, k: int) -> float:
        """Logarithm of the largest share that any head keeps over the last k tokens of a prefix; at most 0.

        ids [n]: the rows of its last n >= k tokens. Rows that are not known let it come out too large.
        """
        total, first = self._nothing(), len(ids) - k
        for runs in self._batches(ids, first):
            total += self._over(ids, runs, first).sum(0)
        return float(total.max())

    def least_tail(self, ids: np.ndarray, k: int, most: int, limit: float) -> int | None:
        """The shortest tail of k to `most` tokens over which no head keeps more than exp(limit): k itself, one that
        begins where a run does, or `most`. None if there is none. ids as above, n >= most."""
        if self.log_kept(ids, k) <= limit:
            return k
        total, first = self._nothing(), len(ids) - most
        for runs in self._batches(ids, first):
            sums = self._over(ids, runs, first).cumsum(0) + total
            held = np.flatnonzero(sums.max(1) <= limit)
            if len(held):
                return max(k, len(ids) - max(runs[held[0]].begin, first))
            total = sums[-1]
        return None

    def begins(self, ids: np.ndarray, most: int) -> list[int]:
        """Where runs of these tokens begin, the last first, but none at or before 0; at most so many."""
        return [run.begin for run in islice(self._runs(ids), most) if run.begin > 0]

    def _nothing(self) -> np.ndarray:
        return np.zeros(self._sums.shape[1], dtype=np.float32)

    def _runs(self, ids: np.ndarray) -> Iterator[_Run]:
        """The runs that the tokens lie in, the last first. Neighbours that are not known are one of their own: a pass
        whose sums are on their way may be thousands of them."""
        end = len(ids)
        while end > 0:
            row = ids[end - 1]
            begin = end - 1 - int(self._steps[row]) if self.known(row) else self._unknown_from(ids, end)
            yield _Run(begin, end)
            end = begin

    def _unknown_from(self, ids: np.ndarray, end: int) -> int:
        """Where the tokens before `end` begin of which none is known."""
        look = RUN
        while True:
            begin = max(end - look, 0)
            there = np.flatnonzero(self.known(ids[begin:end]))
            if len(there) or begin == 0:
                return begin + int(there[-1]) + 1 if len(there) else 0
            look *= 4

    def _batches(self, ids: np.ndarray, first: int) -> Iterator[list[_Run]]:
        """The runs that have tokens from `first` on."""
        runs = iter(self._runs(ids[first:]))
        while batch := [_Run(run.begin + first, run.end + first) for run in islice(runs, _TOGETHER)]:
            yield batch

    def _over(self, ids: np.ndarray, runs: list[_Run], first: int) -> np.ndarray:
        """[N, D] float32: at least the sums over the tokens from `first` on of each run; 0 where they are not known."""
        rows = ids[[run.end - 1 for run in runs]]
        sums = self._sums[rows].astype(np.float32)
        for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
            if not self.known(row):
                sums[i] = 0
            elif run.begin < first:
                sums[i] = self._rest(sums[i], ids, run, first)
        return sums

    def _rest(self, whole: np.ndarray, ids: np.ndarray, run: _Run, first: int) -> np.ndarray:
        """Of a run's sums those of its tokens from `first` on: what they are more than those of the token before."""
        before = ids[first - 1] if first > 0 else NO_ROW
        if not self.known(before) or first - 1 - self._steps[before] != run.begin:
            return self._nothing()
        return np.minimum(whole - (self._sums[before].astype(np.float32) * (1 + ROUNDING) - LEAST), 0)

    def check_invariants(self) -> None:
        """AssertionError names what is broken."""
        sent = self._ticket != NEVER
        assert (self._ticket[sent] <= self._written).all(), "a row waits for a write that was never made"
        assert 0 <= self._arrived <= self._written, (self._arrived, self._written)
        assert ((self._steps >= 0) & (self._steps < RUN)).all(), "a row lies outside of its run"
        here = np.flatnonzero(self._ticket <= self._arrived)
        sums = self._sums[here[:: 1 + len(here) // _CHECKED]]
        assert (sums <= 0).all(), "a head that keeps more than all, or nobody knows what"
