"""Rows of a byte per number, with a scale per row: half of bfloat16's memory and bytes on the link.

    number = byte * scale      scale = largest magnitude of the row / largest magnitude of the format

int8 has steps of 1/127 of the row's largest number, so an outlier channel coarsens all others of its row; fp8 (e4m3)
keeps three bits of every number down to 2^-14 of the largest. Plain torch, on the caller's stream.
"""

from typing import NamedTuple

import torch

from sglang_tailreplay.cuda_streams.row_format import TRAILER, check_hidden, row_bytes

MOVED_AS = torch.int16  # what copies see; no arithmetic is done in it
_FORMATS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
_SMALLEST = 1e-30  # of a scale: a row of zeros has none
_TOGETHER = 2048  # rows that are packed at a time: what lies between is in float32, and the GPU is full of KV


class RowCodec(NamedTuple):
    """Packs rows [..., d] of `dtype` into [..., width] of MOVED_AS, and back."""

    kind: str  # fp8 or int8
    hidden: int  # d, a multiple of 16
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return row_bytes(self.hidden, self.kind, self.dtype.itemsize) // MOVED_AS.itemsize

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """A row that is not finite comes back as NaN, all of it."""
        packed = torch.empty(*rows.shape[:-1], self.hidden + TRAILER, dtype=torch.uint8, device=rows.device)
        flat, out = rows.reshape(-1, self.hidden), packed.view(-1, self.hidden + TRAILER)
        for begin in range(0, len(flat), _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            self._pack(flat[part], out[part])
        return packed.view(MOVED_AS)

    def _pack(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        format, largest = _FORMATS[self.kind]
        scale = rows.abs().amax(-1, keepdim=True).float().div_(largest).clamp_min_(_SMALLEST)
        scaled = rows / scale  # float32
        if self.kind == "int8":
            scaled.round_()
        packed[:, : self.hidden] = scaled.clamp_(-largest, largest).to(format).view(torch.uint8)
        packed.view(torch.float32)[:, self.hidden // 4] = scale[:, 0]

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """out [..., d] of `dtype`."""
        format, _ = _FORMATS[self.kind]
        scale = packed.view(torch.float32)[..., self.hidden // 4, None]
        bytes_ = packed.view(torch.uint8)[..., : self.hidden]
        out.copy_(bytes_.view(format).float().mul_(scale))


def make_codec(kind: str, hidden: int, dtype: torch.dtype) -> RowCodec | None:
    """None for auto: rows are stored as they are. ValueError for a width that cannot be packed."""
    check_hidden(hidden, kind)
    return None if kind == "auto" else RowCodec(kind, hidden, dtype)
