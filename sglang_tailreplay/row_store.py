"""Size and memory of the row store: H[G][R][d] on the host, one row per token and group."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_tailreplay.cuda_streams.pinned import PinnedTensor, pinned_empty
from sglang_tailreplay.errors import TailReplayError

logger = logging.getLogger(__name__)
GIB = 1 << 30


class RowShape(NamedTuple):
    """What one token's rows look like."""

    groups: int  # G
    hidden_size: int  # d
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.groups * self.hidden_size * self.dtype.itemsize


def choose_capacity(row_bytes: int, kv_slots: int, free_bytes: int, host_gb: float | None) -> int:
    """Rows in the store: one per KV slot if they fit; TailReplayError if the wanted size does not fit the machine."""
    if host_gb is None:
        budget = free_bytes // 2
    else:
        budget = int(host_gb * GIB)
        if min(budget, kv_slots * row_bytes) > free_bytes:
            raise TailReplayError(
                f"--tail-replay-host-gb {host_gb:g} does not fit: {free_bytes / GIB:.1f} GiB of host memory are free. "
                "Give less, or leave the flag out for at most half of the free memory."
            )
    capacity = min(kv_slots, budget // row_bytes)
    if capacity < 1:
        raise TailReplayError(
            f"the row store has no room for a single token of {row_bytes} bytes ({budget} bytes given); "
            "raise --tail-replay-host-gb or free host memory."
        )
    return capacity


def free_host_bytes() -> int:
    """Host memory that can be taken, the limit of the container included."""
    import psutil

    free = psutil.virtual_memory().available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class RowStore:
    """The pinned tensor rows [G, R, d]. On a CPU without accelerator the same tensor, not pinned."""

    def __init__(self, shape: RowShape, capacity: int, kv_slots: int):
        self.shape = shape
        self.capacity = capacity
        logger.info(
            "tail_replay: row store of %.2f GiB on the host for %d tokens (%d KV slots), %d bytes a token",
            capacity * shape.bytes / GIB, capacity, kv_slots, shape.bytes,
        )  # fmt: skip
        self._buffer: PinnedTensor = pinned_empty((shape.groups, capacity, shape.hidden_size), shape.dtype)
        if not torch.cuda.is_available():
            # A row that is read before it is written must not look like one.
            self.rows.fill_(float("nan"))

    @property
    def rows(self) -> torch.Tensor:
        return self._buffer.tensor
