"""Reuse at any token with saved states, and caches of two tiers: more policies for cache_model.py. Pure.

The rules are the server's own: where states are saved inside passes and at ends (pass_anchors.positions_inside and
the planner's shares), where a replay begins (replay_rule.begin), and which state a full store gives up (GreedyDual).
A trace knows blocks, so a state at a prompt's end counts as one at the end of its last whole block, as in
cache_model.py. What two prompts share of the next block counts as hit for nobody, but a replay is taken to be so much
longer: a length drawn evenly from that block, for prompts part at any token and states lie at its beginning."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from block_trace import Block, Request
from cache_model import LruPool, Served, cached_prefix, keep
from ttft_model import Tail

from sglang_tailreplay.pass_anchors import positions_inside
from sglang_tailreplay.radix.greedy_dual import GreedyDual
from sglang_tailreplay.replay_rule import begin
from sglang_tailreplay.scheduling import END_SHARE, REACH

GRAPH_TOKENS = 2048  # a pass of at most so many tokens runs in a graph and saves no state inside of it


class Policy(Protocol):
    def serve(self, request: Request, number: int) -> Served: ...


class Hit(NamedTuple):
    """One request."""

    served: Served
    loaded: int  # tokens of the hit whose KV comes from the host
    replayed: int
    start: str  # of replay_rule; "" for a miss, and for policies that replay nothing
    anchored: bool


class Tiered:
    """A policy over all KV, device and host together; the device has what was used last."""

    def __init__(self, policy: Policy, device_tokens: int):
        self.policy, self.device = policy, LruPool(device_tokens)

    def serve(self, request: Request, number: int) -> Hit:
        on_device = cached_prefix(self.device, request.blocks)
        served = self.policy.serve(request, number)
        keep(self.device, request, number)
        replay = getattr(self.policy, "replay", None)
        return Hit(served, max(served.hit - on_device, 0), *(replay or (0, "", False)))


class Settings(NamedTuple):
    """Of tail replay."""

    interval: int  # 0: no states are saved
    tail: Tail = Tail()
    chunk: int = 8192
    by_worth: bool = True  # False: a full store gives up what was used longest ago


class Anchored:
    """Any token, with at most `places` saved states beside `kv_tokens` of KV and rows."""

    def __init__(self, kv_tokens: int, places: int, settings: Settings):
        self.kv, self.places, self.settings = LruPool(kv_tokens), places, settings
        self.saved = self.evicted = 0
        self.replay: tuple[int, str, bool] | None = None  # of the request served last: tokens, start, anchored
        self._order = GreedyDual()
        self._free = list(range(places - 1, -1, -1))
        self._where: dict[int, tuple[Block, int]] = {}  # anchor -> block and offset
        self._of: dict[Hashable, dict[int, int]] = {}  # block -> offset -> anchor
        self._before: dict[Hashable, Block | None] = {}  # block -> the one before it

    def serve(self, request: Request, number: int) -> Served:
        cached = cached_prefix(self.kv, request.blocks)
        hit = min(cached, request.length - 1)
        begun = self._replay(request, number, hit)
        for gone in keep(self.kv, request, number):
            for anchor in self._of.pop(gone, {}).values():
                self._release(anchor)
            self._before.pop(gone, None)
        if self.places and self.settings.interval:
            self._save(request, hit, begun)
        return Served(request.length, cached, hit)

    def _replay(self, request: Request, number: int, hit: int) -> int | None:
        """The anchor that the request's hit begins at."""
        self.replay = None
        if hit == 0:
            return None
        further = random.Random(number).randrange(request.blocks[0].size)
        m = min(hit + further, request.length - 1)
        anchors = self._on_path(request.blocks, hit)
        k = self.settings.tail.of(m)
        chosen = begin(m, k, max(k, REACH * self.settings.interval), anchors, lambda n: True)
        anchor = anchors.get(chosen.anchor)
        if anchor is not None:
            self._order.use(anchor)
        self.replay = (chosen.tail, chosen.kind, anchor is not None)
        return anchor

    def _on_path(self, blocks: Sequence[Block], until: int) -> dict[int, int]:
        """Position -> anchor, the newest first."""
        found, end = [], 0
        for block in blocks:
            found += [(end + offset, anchor) for offset, anchor in self._of.get(block, {}).items()]
            end += block.size
            if end >= until:
                break
        return {position: anchor for position, anchor in sorted(found, reverse=True) if position <= until}

    def _save(self, request: Request, hit: int, begun: int | None) -> None:
        last = next(iter(self._on_path(request.blocks, hit)), 0)
        wanted = []
        for start in range(hit, request.length, self.settings.chunk):
            end = min(start + self.settings.chunk, request.length)
            if end - start > GRAPH_TOKENS:
                wanted += positions_inside(start, end, last, self.settings.interval)
            last = wanted[-1] if wanted else last
            if end < request.length and end - last >= self.settings.interval:
                wanted.append(end)
                last = end
        whole = sum(block.size for block in request.blocks if block.size == request.blocks[0].size)
        if (whole - last) * END_SHARE >= self.settings.interval:
            wanted.append(whole)
        self._put(request.blocks, [position for position in wanted if position > hit], begun)

    def _put(self, blocks: Sequence[Block], positions: Sequence[int], begun: int | None) -> None:
        left, end, before = list(positions), 0, None
        for block in blocks:
            start, end = end, end + block.size
            if block in self.kv:
                self._before[block] = before
            while left and left[0] <= end:
                offset = left.pop(0) - start
                if block in self.kv and offset not in self._of.get(block, {}):
                    self._add(block, offset, begun)
            before = block

    def _add(self, key: Block, offset: int, begun: int | None) -> None:
        if not self._free:
            chosen = self._order.pop(self._worth if self.settings.by_worth else lambda anchor: 0, {begun})
            if chosen is None:
                return
            place, where = self._where[chosen]
            del self._of[place][where]
            self.evicted += 1
            self._release(chosen)
        anchor = self._free.pop()
        self._where[anchor] = (key, offset)
        self._of.setdefault(key, {})[offset] = anchor
        self._order.add(anchor)
        self.saved += 1

    def _release(self, anchor: int) -> None:
        del self._where[anchor]
        self._order.remove(anchor)
        self._free.append(anchor)

    def _worth(self, anchor: int) -> int:
        """As NodeAnchors: tokens behind the anchor before it, or the start, at most the reach."""
        reach = REACH * self.settings.interval
        key, gap = self._where[anchor]
        earlier = max((offset for offset in self._of[key] if offset < gap), default=None)
        while earlier is None and gap < reach:
            block = self._before.get(key)
            if block is None:
                return min(gap, reach)
            key, gap = block, gap + block.size
            earlier = max(self._of.get(key, {}), default=None)
        return min(gap - (earlier or 0), reach)
