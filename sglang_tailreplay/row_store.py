"""Size and memory of the row store: H[G][R][d] on the host, one row per token and group."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_tailreplay.cuda_streams.pinned import PinningError, pinned_empty
from sglang_tailreplay.cuda_streams.row_codec import MOVED_AS, RowCodec
from sglang_tailreplay.errors import TailReplayError

logger = logging.getLogger(__name__)
GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
# limit and use in version 2 of cgroups and in version 1
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class RowShape(NamedTuple):
    """What one token's rows look like."""

    groups: int  # G
    hidden_size: int  # d
    dtype: torch.dtype
    codec: RowCodec | None = None  # how they are stored; None: as they are
    beside: int = 0  # bytes of a token in a store of its own that has as many rows

    @property
    def stored(self) -> tuple[int, torch.dtype]:
        """Width and dtype of a row in the store."""
        return (self.hidden_size, self.dtype) if self.codec is None else (self.codec.width, MOVED_AS)

    @property
    def bytes(self) -> int:
        width, dtype = self.stored
        return self.groups * width * dtype.itemsize + self.beside


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
    for limit_file, used_file in CGROUP_FILES:
        limit, used = _number(CGROUP / limit_file), _number(CGROUP / used_file)
        if limit is not None and used is not None:
            return min(free, limit - used + _page_cache(CGROUP / used_file))
    return free


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _page_cache(used: Path) -> int:
    """Bytes of file pages that count as used but are given back on demand, such as the checkpoint just read."""
    try:
        lines = used.with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return sum(int(fields.get(name, 0)) for name in ("inactive_file", "active_file"))


class RowStore:
    """The pinned tensor rows [G, R, d]. On a CPU without accelerator the same tensor, not pinned."""

    def __init__(self, shape: RowShape, capacity: int, kv_slots: int):
        self.shape = shape
        self.capacity = capacity
        logger.info(
            "tail_replay: row store of %.2f GiB on the host for %d tokens (%d KV slots), %d bytes a token",
            capacity * shape.bytes / GIB, capacity, kv_slots, shape.bytes,
        )  # fmt: skip
        try:
            width, dtype = shape.stored
            self._buffer = pinned_empty((shape.groups, capacity, width), dtype)
        except PinningError as error:
            raise TailReplayError(f"--tail-replay-host-gb: {error}") from error
        if not torch.cuda.is_available():
            # A row that is read before it is written must not look like one.
            self.rows.fill_(float("nan") if self.rows.is_floating_point() else -1)  # of bytes 0xFF, a scale is NaN

    @property
    def rows(self) -> torch.Tensor:
        return self._buffer.tensor
