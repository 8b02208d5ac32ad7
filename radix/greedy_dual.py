"""Which of many things of one size is given up first: GreedyDual, on integers.

    due = clock at its last use + uses * what it is worth       the least one goes, the longest unused of equals first
    clock = the highest due of what has gone so far

What is worth twice as much, or was used twice as often, outlives twice as many others without being used again. Being
added is a use, and only MOST_USES count, so that what was popular once goes in the end. Things may become worth more
while they are held: a heap has a lower bound of each one's due, which is looked at again when it comes to the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

MOST_USES = 8


class _Use(NamedTuple):
    """The last one of a key."""

    clock: int
    tick: int
    count: int  # this one included


class GreedyDual:
    """Keys, each held at most once. Every operation takes O(log n) for each key that was added, used or has become
    worth more since it was last looked at."""

    def __init__(self) -> None:
        self.clock = 0
        self._ticks = 0  # orders uses at the same clock
        self._used: dict[int, _Use] = {}
        self._added: dict[int, int] = {}  # key -> tick; tells a key's entry from that of its earlier stay
        self._heap: list[tuple[int, int, int, int]] = []  # due at least, tick of the use meant, tick added, key

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: int) -> bool:
        return key in self._used

    def __iter__(self) -> Iterator[int]:
        return iter(self._used)

    def add(self, key: int) -> None:
        """A key that is not held; this is its first use."""
        assert key not in self._used, f"{key} is held already"
        self._ticks += 1
        self._used[key], self._added[key] = _Use(self.clock, self._ticks, 1), self._ticks
        heapq.heappush(self._heap, (self.clock, self._ticks, self._ticks, key))

    def use(self, key: int) -> None:
        """Nothing happens to a key that is not held."""
        if key in self._used:
            self._ticks += 1
            count = min(self._used[key].count + 1, MOST_USES)
            self._used[key] = _Use(self.clock, self._ticks, count)  # its entry stays: a lower bound

    def remove(self, key: int) -> None:
        """Nothing happens to a key that is not held."""
        if key in self._used:
            del self._used[key], self._added[key]
            if len(self._heap) > 2 * len(self._used) + 64:
                self._heap = [entry for entry in self._heap if self._is_current(entry)]
                heapq.heapify(self._heap)

    def pop(self, worth: Callable[[int], int], spared: Collection[int] = ()) -> int | None:
        """Remove and return the key that is due first of those not spared; None if there is none.

        `worth` must not be negative, and must not have fallen since the key was added for the order to be exact.
        """
        put_back, found = [], None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            *_, added, key = entry
            last = self._used[key]
            now = (last.clock + last.count * worth(key), last.tick, added, key)
            if key in spared:
                put_back.append(entry)
            elif now > entry:
                heapq.heappush(self._heap, now)
            else:
                found, self.clock = key, max(self.clock, now[0])
        for entry in put_back:
            heapq.heappush(self._heap, entry)
        if found is not None:
            self.remove(found)
        return found

    def _is_current(self, entry: tuple[int, int, int, int]) -> bool:
        *_, added, key = entry
        return self._added.get(key) == added

    def check_invariants(self) -> None:
        """AssertionError if a held key has not exactly one entry, or one above its last use."""
        entries = {entry[-1]: entry for entry in self._heap if self._is_current(entry)}
        assert sum(map(self._is_current, self._heap)) == len(entries), "a key has two entries"
        assert entries.keys() == self._used.keys() == self._added.keys(), "keys without an entry, or entries without"
        assert len(self._heap) <= 2 * len(self._used) + 64 + 1, "entries of keys that are gone pile up"
