"""Which tokens of a trace a prefix cache serves, by two policies over finite pools with LRU eviction. Pure.

any token     every cached token counts, but the last of a prompt is always computed (tail replay, with all rows)
checkpoints   a hit ends where a recurrent state was kept: at ends of prefill chunks and of prompts (stock SGLang)

A trace knows tokens by blocks, so what two prompts share inside a block counts for neither policy, and a state at a
prompt's end counts as one at the end of its last whole block, which flatters checkpoints. Answers take room and are
never shared: a trace does not tell their blocks. Requests are served one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from block_trace import Block, Request


class Pools(NamedTuple):
    """None: without limit."""

    kv_tokens: int | None
    state_slots: int | None = None


class Served(NamedTuple):
    length: int  # prompt tokens
    cached: int  # whose KV was there
    hit: int  # that were served from the cache


class LruPool:
    """Keys with sizes, at most `capacity` of them together. A key that alone is too large is never held."""

    def __init__(self, capacity: int | None):
        self.capacity = capacity
        self.used = self.inserted = self.evicted = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()  # the one used longest ago first

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, key: Hashable, size: int = 1) -> list[Hashable]:
        """Make key the one used last, inserted if needed. Returns what was evicted for it."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return []
        self._sizes[key] = size
        self.used += size
        self.inserted += size
        return self._shrink()

    def _shrink(self) -> list[Hashable]:
        gone = []
        while self.capacity is not None and self.used > self.capacity:
            key, size = self._sizes.popitem(last=False)
            self.used -= size
            self.evicted += size
            gone.append(key)
        return gone

    def drop(self, key: Hashable) -> None:
        size = self._sizes.pop(key, 0)
        self.used -= size
        self.evicted += size


class AnyToken:
    def __init__(self, pools: Pools):
        self.kv = LruPool(pools.kv_tokens)

    def serve(self, request: Request, number: int) -> Served:
        cached = cached_prefix(self.kv, request.blocks)
        keep(self.kv, request, number)
        return Served(request.length, cached, min(cached, request.length - 1))


class Checkpoints:
    def __init__(self, pools: Pools, chunk: int):
        self.kv, self.states, self.chunk = LruPool(pools.kv_tokens), LruPool(pools.state_slots), chunk

    def serve(self, request: Request, number: int) -> Served:
        cached = cached_prefix(self.kv, request.blocks)
        limit, hit, end, found = min(cached, request.length - 1), 0, 0, None
        for block in request.blocks:
            end += block.size
            if end <= limit and block in self.states:
                hit, found = end, block
        if found is not None:
            self.states.touch(found)
        for gone in keep(self.kv, request, number):
            self.states.drop(gone)
        for block in checkpoints(request.blocks, hit, self.chunk):
            if block in self.kv:
                self.states.touch(block)
        return Served(request.length, cached, hit)


def cached_prefix(kv: LruPool, blocks: Iterable[Block]) -> int:
    tokens = 0
    for block in blocks:
        if block not in kv:
            break
        tokens += block.size
    return tokens


def keep(kv: LruPool, request: Request, number: int) -> list[Hashable]:
    """The request's tokens, as a tree has them: a block is used after those behind it, so that leaves go first."""
    gone = kv.touch(("answer", number), request.output) if request.output else []
    for block in reversed(request.blocks):
        gone += kv.touch(block, block.size)
    return gone


def checkpoints(blocks: Sequence[Block], hit: int, chunk: int) -> list[Block]:
    """Last blocks of the prefixes that a prefill of [hit, length) keeps states of, each cut to whole blocks."""
    length = sum(block.size for block in blocks)
    wanted = [*range(hit + chunk, length, chunk), length]
    kept, end, last = [], 0, None
    whole = max(block.size for block in blocks)
    for block in blocks:
        while wanted and wanted[0] < end + block.size:
            kept.append(last)
            wanted.pop(0)
        end += block.size
        last = block if block.size == whole else last
    return list(dict.fromkeys(block for block in [*kept, last] if block is not None))


def simulate(requests: Iterable[Request], policy: AnyToken | Checkpoints) -> list[Served]:
    return [policy.serve(request, number) for number, request in enumerate(requests)]
