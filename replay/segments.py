"""Where the tokens of a launch belong: the metadata that varlen kernels read, laid out for fixed memory.

One int32 tensor holds all of it, so that a launch costs one upload, and a CUDA graph can be captured over it: the
tensor has room for a fixed number of segments and chunks, and what a launch does not use is empty. A chunk is CHUNK
consecutive tokens of one segment; kernels run one program per chunk.

    # segment i is tokens [cu[i], cu[i + 1]); its chunk j is [cu[i] + j*CHUNK, min(cu[i] + (j+1)*CHUNK, cu[i + 1]))
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_tailreplay.replay.tail import Launch

Tensor = torch.Tensor

CHUNK = 64  # of SGLang's and FLA's chunked gated delta rule
NO_SLOT = -1  # a segment without tokens; kernels neither read nor write a state for it


class Segments(NamedTuple):
    """The pieces of one launch, laid one after another along T. N counts the empty ones too."""

    cu: Tensor  # [N + 1] int32
    slots: Tensor  # [N] int32: state slot of the segment, no slot twice; NO_SLOT where it is empty
    # [N] int32. 1: conv and recurrent state in the slot are the initial state.
    # 0: the conv window is zero, whatever the slot holds; the recurrent state in the slot was zeroed by its owner.
    continues: Tensor
    chunks: Tensor  # [NC, 2] int32: segment, and number of the chunk in it; an empty segment where there is no chunk
    chunk_offsets: Tensor  # [N + 1] int32: chunks before the segment
    # The same as cu, for code that must not wait for the device. None in a captured launch, where they change.
    lengths: tuple[int, ...] | None


def chunk_count(lengths: Sequence[int]) -> int:
    return sum(-(-length // CHUNK) for length in lengths)


class SegmentTable:
    """Device memory for the segments of one launch at a time."""

    def __init__(self, segments: int, chunks: int, device: torch.device) -> None:
        """Room for `segments` segments and `chunks` chunks; one more segment is there and stays empty."""
        self.segments = segments + 1
        self.chunks = chunks
        self._packed = torch.empty(_packed_size(self.segments, chunks), dtype=torch.int32, device=device)
        self.load(Launch(()), torch.empty(0, dtype=torch.int32, device=device))

    def load(self, launch: Launch, slots: Tensor) -> None:
        """Describe the launch; `slots` [hits] integers: the slot of every hit. On the current stream; never waits."""
        packed = torch.from_numpy(describe(launch, self.segments, self.chunks))
        pinned = self._packed.is_cuda
        # From pageable memory the copy would wait for the stream.
        self._packed.copy_(packed.pin_memory() if pinned else packed, non_blocking=pinned)
        if launch.pieces:
            first, last = launch.pieces[0].hit, launch.pieces[-1].hit  # consecutive hits: see Launch
            self._fields(self.chunks).slots[: last - first + 1].copy_(slots[first : last + 1])

    def whole(self, tokens: int) -> Segments:
        """All segments, and as many chunks as `tokens` tokens can have at most: what a captured launch reads."""
        most = tokens // CHUNK + self.segments - 1
        assert most <= self.chunks, f"{most} chunks of {tokens} tokens, but there is room for {self.chunks}"
        return self._fields(most)

    def exact(self, launch: Launch) -> Segments:
        """The segments and chunks of the loaded launch, no empty ones."""
        lengths = tuple(piece.length for piece in launch.pieces)
        n = len(lengths)
        whole = self._fields(chunk_count(lengths))
        return Segments(
            whole.cu[: n + 1], whole.slots[:n], whole.continues[:n], whole.chunks, whole.chunk_offsets[: n + 1], lengths
        )

    def _fields(self, chunks: int) -> Segments:
        cu, slots, continues, offsets, pairs = self._packed.split(_sizes(self.segments, self.chunks))
        return Segments(cu, slots, continues, pairs.view(-1, 2)[:chunks], offsets, None)


def describe(launch: Launch, segments: int, chunks: int) -> np.ndarray:
    """The table's content, without the slots, for a launch of fewer than `segments` pieces. The last segment is empty.

    Raises: ValueError for a launch with more pieces or chunks than there is room for.
    """
    lengths = np.array([piece.length for piece in launch.pieces], dtype=np.int32)
    counts = -(-lengths // CHUNK)
    if len(lengths) >= segments or counts.sum() > chunks:
        raise ValueError(f"{len(lengths)} pieces with {counts.sum()} chunks, room for {segments - 1} with {chunks}")
    packed = np.zeros(_packed_size(segments, chunks), dtype=np.int32)
    cu, slots, continues, offsets, pairs = np.split(packed, np.cumsum(_sizes(segments, chunks))[:-1])
    n, used = len(lengths), int(counts.sum())
    cu[1:] = lengths.sum()
    cu[1 : n + 1] = lengths.cumsum()
    slots[:] = NO_SLOT
    continues[:n] = [piece.continues for piece in launch.pieces]
    offsets[1:] = used
    offsets[1 : n + 1] = counts.cumsum()
    pairs = pairs.reshape(-1, 2)
    owner = np.repeat(np.arange(n, dtype=np.int32), counts)
    pairs[:used, 0] = owner
    pairs[:used, 1] = np.arange(used, dtype=np.int32) - offsets[owner]
    pairs[used:, 0] = segments - 1
    return packed


def _sizes(segments: int, chunks: int) -> list[int]:
    return [segments + 1, segments, segments, segments + 1, 2 * chunks]


def _packed_size(segments: int, chunks: int) -> int:
    return sum(_sizes(segments, chunks))
