"""Anchors: recurrent states of all GDN layers, saved in pinned host memory.

    forward lane   pass that ends at a position | states gathered |  ...        (inside a pass: layer by layer)
    copy lane                                                     | states out | ... | states in
    replay lane                                                       wait states in | into the slots | tails
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_tailreplay.anchor_codec import Stored, decode, encode, stored
from sglang_tailreplay.cuda_streams.lanes import Event, Lanes, keep
from sglang_tailreplay.cuda_streams.pinned import PinningError, pinned_empty
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.step import Take

logger = logging.getLogger(__name__)
GIB = 1 << 30
Tensor = torch.Tensor


class Fetched(NamedTuple):
    """States on their way to the device."""

    parts: tuple[Tensor, ...]  # [n, layers, ...] of every part of the pool
    ready: Event


def _kept(parts: Sequence[Tensor], dtype: str) -> list[Stored]:
    """What is kept of one request's states: of the windows all, of the recurrent states, the last part, a code."""
    whole = [Stored((part.shape[0], *part.shape[2:]), part.dtype) for part in parts]
    return [*whole[:-1], *stored(dtype, *whole[-1])]


def anchor_bytes(parts: Sequence[Tensor], dtype: str) -> int:
    """Bytes of one request's states on the host; parts are [layers, slots, ...]."""
    return sum(kept.bytes for kept in _kept(parts, dtype))


def choose_anchors(bytes_each: int, kv_slots: int, interval: int, free_bytes: int, anchor_gb: float | None) -> int:
    """Places in the anchor store; TailReplayError if the wanted size does not fit the machine, or holds no state."""
    budget = free_bytes // 8 if anchor_gb is None else int(anchor_gb * GIB)
    count = min(math.ceil(kv_slots / interval), budget // bytes_each)
    if count * bytes_each > free_bytes:
        raise TailReplayError(
            f"--tail-replay-anchor-gb {anchor_gb:g} does not fit: {free_bytes / GIB:.1f} GiB of host memory are free. "
            "Give less, or leave the flag out for at most 1/8 of the free memory."
        )
    if count < 1:
        raise TailReplayError(
            f"the anchor store has no room for one state of {bytes_each} bytes ({budget} bytes given); raise "
            "--tail-replay-anchor-gb or free host memory, or leave --tail-replay-anchor-interval out."
        )
    return count


class AnchorStore:
    """Moves states between SGLang's pool and the host, where recurrent states are kept as `dtype` says."""

    def __init__(self, mamba_pool: Any, capacity: int, lanes: Lanes, dtype: str = "fp32"):
        self.capacity = capacity
        self.dtype = dtype
        self._lanes = lanes
        cache = mamba_pool.mamba_cache
        self._pool: tuple[Tensor, ...] = (*cache.conv, cache.temporal)  # [layers, slots, ...] each
        size = capacity * anchor_bytes(self._pool, dtype) / GIB
        logger.info("tail_replay: anchor store of %.2f GiB on the host for %d states in %s", size, capacity, dtype)
        try:
            self._buffers = [
                pinned_empty((capacity, *kept.shape), kept.dtype, copied=True) for kept in _kept(self._pool, dtype)
            ]
        except PinningError as error:
            raise TailReplayError(f"--tail-replay-anchor-gb: {error}") from error
        self._host = [buffer.tensor for buffer in self._buffers]
        self._next: list[Take] = []
        self._saved = np.zeros(capacity, dtype=np.int64)  # layers of each place that were sent to it

    @property
    def window(self) -> int:
        """Tokens of a convolution's window, W-1."""
        return self._pool[0].shape[-1]

    @property
    def _layers(self) -> int:
        return self._pool[0].shape[0]

    def forget(self, anchor: int) -> None:
        """The place was given to a state that is not there yet; what it was to get before, it does not get any more."""
        self._saved[anchor] = 0
        self._next = [take for take in self._next if take.anchor != anchor]

    def whole(self, anchor: int) -> bool:
        """Whether all of the state that the place was given to is there, or on its way before any later `fetch`."""
        return bool(self._saved[anchor] == self._layers)

    def keep(self, layer: int, states: Sequence[Tensor], anchors: Sequence[int]) -> None:
        """Save one layer's part of states, one tensor [n, ...] per part of the pool, made on the current stream.

        `layer` is its index in the pool. The host does not wait.
        """
        self._send(self._encode(states), [(anchor, layer) for anchor in anchors])
        self._saved[list(anchors)] += 1

    def _send(self, parts: Sequence[Tensor], places: Sequence[int | tuple[int, int]]) -> None:
        """Copy parts [n, ...], made on the current stream, to n places: anchors, or one layer of each."""
        copy = self._lanes.copy
        with copy.after(self._lanes.mark_current("states gathered")):
            copy.reads(*parts)
            copy.writes(*self._host)
            for part, host in zip(parts, self._host, strict=True):
                for i, place in enumerate(places):
                    host[place].copy_(part[i], non_blocking=True)

    def _encode(self, states: Sequence[Tensor]) -> list[Tensor]:
        """One tensor [n, ...] per part of the pool, as they are kept: new memory."""
        *windows, state = states
        pools = self._pool
        kept = [window.to(pool.dtype) for window, pool in zip(windows, pools, strict=False)]
        return [part.contiguous() for part in (*kept, *encode(self.dtype, state, pools[-1].dtype))]

    def take_next(self, take: Take) -> None:
        """Save the state in a slot when the next pass begins, or the replay ahead of it. Nobody changes it until then:
        a free slot is cleared for the pass that uses it next. Whatever is fetched for that pass is fetched later."""
        self._next.append(take)
        self._saved[take.anchor] = self._layers

    def pass_begins(self) -> None:
        """On the forward stream, before a pass, or the replay ahead of it, changes any slot."""
        if self._next:
            takes, self._next = self._next, []
            self.take(takes)

    def take(self, takes: Sequence[Take]) -> None:
        """Save the states in the slots as they are on the current stream now. The host does not wait."""
        # Numbers that the scheduler's stream made; with a request that has ended nobody else keeps their memory.
        self._lanes.current_reads(*(take.slot for take in takes))
        slots = torch.stack([take.slot for take in takes]).to(torch.int64)
        # The next pass on this stream changes the slots; the copies are its own.
        copies = self._encode([part.index_select(1, slots).transpose(0, 1) for part in self._pool])
        anchors = [take.anchor for take in takes]
        self._send(copies, anchors)
        self._saved[anchors] = self._layers

    def fetch(self, anchors: Sequence[int]) -> Fetched:
        """Bring whole states to the device, on the copy lane: after every save that was asked for before."""
        assert all(self.whole(anchor) for anchor in anchors), f"states that are not whole: {anchors}"
        copy, device = self._lanes.copy, self._pool[0].device
        with copy.after():
            copy.reads(*self._host)
            parts = tuple(host.new_empty((len(anchors), *host.shape[1:]), device=device) for host in self._host)
            copy.writes(*parts)
            for part, host in zip(parts, self._host, strict=True):
                keep(part, self._lanes.replay)
                for i, anchor in enumerate(anchors):
                    part[i].copy_(host[anchor], non_blocking=True)
            return Fetched(parts, copy.record("states fetched"))

    def restore(self, fetched: Fetched, slots: Tensor) -> None:
        """Put fetched states into the slots [n] on the replay lane, the current one, which waits for them."""
        windows = len(self._pool) - 1
        self._lanes.current_waits(fetched.ready)
        self._lanes.replay.reads(*fetched.parts)
        self._lanes.replay.writes(*self._pool)
        state = decode(self.dtype, fetched.parts[windows:], self._pool[-1].dtype)
        for part, pool in zip((*fetched.parts[:windows], state), self._pool, strict=True):
            pool.index_copy_(1, slots.to(torch.int64), part.transpose(0, 1))
