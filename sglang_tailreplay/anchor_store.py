"""Anchors: recurrent states of all GDN layers, saved in pinned host memory.

    forward lane   pass that ends at a position | states gathered |  ...
    copy lane                                                     | states out | ... | states in
    replay lane                                                       wait states in | into the slots | tails
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sglang_tailreplay.cuda_streams.lanes import Event, Lanes, keep
from sglang_tailreplay.cuda_streams.pinned import PinningError, pinned_empty
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.scheduling import Take

logger = logging.getLogger(__name__)
GIB = 1 << 30
Tensor = torch.Tensor


class Fetched(NamedTuple):
    """States on their way to the device."""

    parts: tuple[Tensor, ...]  # [n, layers, ...] of every part of the pool
    ready: Event


def state_bytes(parts: Sequence[Tensor]) -> int:
    """Bytes of one request's states; parts are [layers, slots, ...]."""
    return sum(part[:, 0].numel() * part.dtype.itemsize for part in parts)


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
    """Moves states between SGLang's pool and the host. The pool's dtypes are kept: an anchor is exact."""

    def __init__(self, mamba_pool: Any, capacity: int, lanes: Lanes):
        self.capacity = capacity
        self._lanes = lanes
        cache = mamba_pool.mamba_cache
        self._pool: tuple[Tensor, ...] = (*cache.conv, cache.temporal)  # [layers, slots, ...] each
        size = capacity * state_bytes(self._pool) / GIB
        logger.info("tail_replay: anchor store of %.2f GiB on the host for %d states", size, capacity)
        try:
            self._buffers = [
                pinned_empty((capacity, part.shape[0], *part.shape[2:]), part.dtype) for part in self._pool
            ]
        except PinningError as error:
            raise TailReplayError(f"--tail-replay-anchor-gb: {error}") from error
        self._host = [buffer.tensor for buffer in self._buffers]

    def take(self, takes: Sequence[Take]) -> None:
        """Save the states in the slots as they are on the current stream now. The host does not wait."""
        slots = torch.stack([take.slot for take in takes]).to(torch.int64)
        # The next pass on this stream changes the slots; the copies are its own.
        copies = [part.index_select(1, slots).transpose(0, 1).contiguous() for part in self._pool]
        copy = self._lanes.copy
        with copy.after(self._lanes.mark_current("states gathered")):
            copy.reads(*copies)
            copy.writes(*self._host)
            for part, host in zip(copies, self._host, strict=True):
                for i, take in enumerate(takes):
                    host[take.anchor].copy_(part[i], non_blocking=True)

    def fetch(self, anchors: Sequence[int]) -> Fetched:
        """Bring states to the device, on the copy lane: after every `take` that was asked for before."""
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
        self._lanes.current_waits(fetched.ready)
        self._lanes.replay.reads(*fetched.parts)
        self._lanes.replay.writes(*self._pool)
        for part, pool in zip(fetched.parts, self._pool, strict=True):
            pool.index_copy_(1, slots.to(torch.int64), part.transpose(0, 1))
