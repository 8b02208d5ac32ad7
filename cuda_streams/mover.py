"""Writes rows out and fetches them back, beside the forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_tailreplay.cuda_streams.lanes import Event, Lanes, keep
from sglang_tailreplay.cuda_streams.row_codec import RowCodec
from sglang_tailreplay.cuda_streams.rows import check_row_width, gather_rows, scatter_groups, scatter_rows

Ids = np.ndarray | torch.Tensor | Sequence[int]


class Fetched(NamedTuple):
    """Rows of one group on their way to the device."""

    tensor: torch.Tensor  # [T, H]
    ready: Event  # on the copy lane; wait for it before reading the tensor


class RowMover:
    """Moves rows between the device and the host pool, all of it on the copy lane.

    One lane, in the order of the calls: a fetch sees every row whose `write_out` was called before it, and a
    `write_out` never overtakes an earlier fetch of the row that it replaces. The price: a fetch also waits until the
    forward pass has made the rows of the write-outs before it. Calls come from one thread.

    Ids [T] are best given on the host, where they are checked. On the device they are taken as they are: int64, below
    R, and an id below 0 is a token without a row.
    """

    def __init__(
        self, rows: torch.Tensor, lanes: Lanes, device: torch.device | str = "cpu", codec: RowCodec | None = None
    ) -> None:
        """`rows` [G, R, H] on the host: pinned where `device` is a GPU (see `pinned_empty`). The mover does not own it.

        With a codec, `rows` are packed, [G, R, codec.width]; sources and fetched tensors are not, and what packs them
        runs on the copy lane, beside the forward pass.
        Raises: ValueError for a row that is not a multiple of 16 bytes, or for unpinned rows with a GPU.
        """
        self.rows = rows
        self.codec = codec
        self.hidden = rows.shape[2] if codec is None else codec.hidden
        self._dtype = rows.dtype if codec is None else codec.dtype
        self.lanes = lanes
        self.device = torch.device(device)
        check_row_width(rows.shape[2], rows.dtype)
        if self.device.type == "cuda" and not rows.is_pinned():
            raise ValueError("rows must be pinned: a GPU cannot read plain host memory")
        self._ring = IdRing(lanes, self.device)

    def write_out(self, group: int | None, source: torch.Tensor, ids: Ids) -> Event:
        """Writes source[t] to rows[group, ids[t]]; with group None, source[g, t] to rows[g, ids[t]] for every group.

        The caller is on the stream that made `source` ([T, H] or [G, T, H], on the device) and changes it no more; it
        may drop it at once. No row twice; a token with an id below 0 is not written. Returns the event after which
        the host may read the rows. The host does not wait.
        Raises: ValueError for an id beyond the pool, or shapes that do not fit.
        """
        ids = self._checked(ids, lowest=None)
        made = self.lanes.mark_current("rows made")
        copy = self.lanes.copy
        with copy.after(made):
            copy.reads(source)
            copy.writes(self.rows)
            device_ids = self._on_device(ids)
            if self.codec is not None:
                source = self.codec.pack(source)
            if group is None:
                scatter_groups(source, self.rows, device_ids)
            else:
                scatter_rows(source, self.rows, group, device_ids)
            return copy.record("rows written")

    def upload(self, ids: Ids) -> torch.Tensor:
        """Ids [T] on the device, for several fetches. For the copy lane only.

        Raises: ValueError for an id outside [0, R).
        """
        ids = self._checked(ids, lowest=0)
        with self.lanes.copy.after():
            return self._on_device(ids)

    def fetch(
        self, groups: Sequence[int], ids: Ids, out: torch.Tensor | None = None, after: Sequence[Event] = ()
    ) -> list[Fetched]:
        """Rows ids [T] of every group, in the order of `groups`, so that one group is replayed while the next arrives.

        The replay lane may read the tensors after their events and drop them at will; any other lane must `keep` them
        first. `out` [len(groups), T, H] is filled instead of new tensors. The copy lane waits for the events `after`:
        those by which `out` is free, and ids on the device are made. The host does not wait.
        Raises: ValueError for an id outside [0, R), or shapes that do not fit.
        """
        ids = self._checked(ids, lowest=0)
        copy, (T, H) = self.lanes.copy, (len(ids), self.hidden)
        if out is not None and out.shape != (len(groups), T, H):
            raise ValueError(f"out must be {(len(groups), T, H)}, got {tuple(out.shape)}")
        fetched: list[Fetched] = []
        with copy.after(*after):
            copy.reads(self.rows)
            device_ids = self._on_device(ids)
            for i, group in enumerate(groups):
                tensor = out[i] if out is not None else self.rows.new_empty(T, H, dtype=self._dtype, device=self.device)
                copy.writes(tensor)
                keep(tensor, self.lanes.replay)
                self._gather(group, device_ids, tensor)
                fetched.append(Fetched(tensor, copy.record("rows fetched")))
        return fetched

    def _gather(self, group: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        if self.codec is None:
            gather_rows(self.rows, group, ids, out)
            return
        packed = self.rows.new_empty(len(ids), self.codec.width, device=self.device)  # the copy lane's own
        gather_rows(self.rows, group, ids, packed)
        self.codec.unpack(packed, out)

    def _checked(self, ids: Ids, lowest: int | None) -> torch.Tensor:
        """Ids as int64 [T]; on the host all below R and none below `lowest`."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        if ids.ndim != 1:
            raise ValueError(f"ids must be [T], got {tuple(ids.shape)}")
        if ids.device.type == "cpu" and len(ids):
            low, high = (int(x) for x in torch.aminmax(ids))
            if high >= self.rows.shape[1] or (lowest is not None and low < lowest):
                raise ValueError(f"ids [{low}, {high}] leave the pool of {self.rows.shape[1]} rows")
        return ids

    def _on_device(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "cpu":
            return self._ring.upload(ids)
        self.lanes.copy.reads(ids)
        return ids


class IdRing:
    """Uploads ids through a few pinned buffers. A buffer is written again only when the copy out of it is done."""

    def __init__(self, lanes: Lanes, device: torch.device, buffers: int = 16) -> None:
        self.lanes = lanes
        self.device = device
        self._buffers = [self._allocate(1024) for _ in range(buffers)]
        self._uploaded: list[Event | None] = [None] * buffers
        self._next = 0

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Copy of the host ids [T] on the device, ordered on the copy lane, which the caller has entered.

        Blocks the host only when all buffers are still on their way.
        """
        i, self._next = self._next, (self._next + 1) % len(self._buffers)
        if self._uploaded[i] is not None:
            self._uploaded[i].synchronize()
        if len(self._buffers[i]) < len(ids):
            self._buffers[i] = self._allocate(1 << (len(ids) - 1).bit_length())
        staged = self._buffers[i][: len(ids)]
        self.lanes.host.writes(staged)
        staged.copy_(ids)

        copy = self.lanes.copy
        copy.reads(staged)
        uploaded = torch.empty(len(ids), dtype=torch.int64, device=self.device)
        uploaded.copy_(staged, non_blocking=True)
        self._uploaded[i] = copy.record("ids uploaded")
        return uploaded

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
