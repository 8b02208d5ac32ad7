"""Anchors inside a prefill pass: states that the chunked delta rule goes through anyway, saved layer by layer.

    a request's part of a pass   begin        begin+64       begin+128  ...        end
    states that exist            in the slot  before chunk 1 before chunk 2        in the slot when the pass is over

The kernels cut a request's part of a pass into chunks of 64 tokens from where it begins, and so the positions count
from there: from a multiple of --chunked-prefill-size for a cold prompt, from the boundary behind a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang_tailreplay.replay.segments import CHUNK, Segments, SegmentTable, chunk_count

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_tailreplay.anchor_store import AnchorStore
    from sglang_tailreplay.gdn import Core

Tensor = torch.Tensor


class Keep(NamedTuple):
    """A state to be saved while the pass runs."""

    request: int  # index in the batch
    chunk: int  # the state before this chunk of the request's part: after chunk * CHUNK of its tokens
    anchor: int  # where in the anchor store


def positions_inside(begin: int, end: int, last: int, interval: int, chunk: int = CHUNK) -> list[int]:
    """Positions begin < p < end, multiples of chunk behind begin, that are anchors where the one before is at `last`.

    Each is the first that lies `interval` tokens or more behind the one before it.
    """
    found = []
    while True:
        chunks = -(-max(last + interval - begin, 1) // chunk)
        last = begin + chunks * chunk
        if last >= end:
            return found
        found.append(last)


class _Pass(NamedTuple):
    segments: Segments
    chunks: Tensor  # [n] int64: numbers of the chunks in the pass
    windows: Tensor  # [n, W-1] int64: tokens of the pass whose conv inputs are the window at the chunk's begin
    anchors: list[int]  # [n]


class PassAnchors:
    """One forward pass at a time, outside of graphs, on the forward stream. Runs its GDN layers on `core`."""

    def __init__(self, core: Core, pool: HybridReqToTokenPool, store: AnchorStore, device: torch.device):
        self._core, self._pool, self._store, self._device = core, pool, store, device
        self._pass: _Pass | None = None
        self._missing: set[int] = set()  # GDN layers that the pass has not come to

    @property
    def active(self) -> bool:
        """Whether the pass that runs has states to be saved."""
        return self._pass is not None

    def begin(self, forward_batch: ForwardBatch, keeps: Sequence[Keep]) -> None:
        from sglang_tailreplay.prefill_graphs import launch_of

        lengths = forward_batch.extend_seq_lens_cpu
        slots = self._pool.get_mamba_indices(forward_batch.req_pool_indices)
        slots = self._pool.translate_mamba_indices(slots).to(torch.int32)
        launch = launch_of(lengths, forward_batch.extend_prefix_lens_cpu)
        table = SegmentTable(len(lengths), chunk_count(lengths), self._device)
        table.load(launch, slots)
        width = self._store.window
        chunks, windows = locate(lengths, keeps, width)
        self._pass = _Pass(
            table.exact(launch), self._upload(chunks), self._upload(windows), [keep.anchor for keep in keeps]
        )
        self._missing = set(self._pool.mamba_map)

    def attend(self, layer: RadixLinearAttention, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """o [1, T, HV, V], as RadixLinearAttention.forward; on its way the layer's states go to the store."""
        now = self._pass
        # First: SGLang's convolution may write over its input.
        conv = qkv[now.windows].transpose(1, 2)  # [n, C, W-1]
        o, states = self._core.attend_and_keep(layer, qkv, b, a, now.segments, now.chunks)
        self._store.keep(self._pool.mamba_map[layer.layer_id], (conv, states), now.anchors)
        self._missing.discard(layer.layer_id)
        return o

    def end(self) -> None:
        """The pass was launched. AssertionError if it went past a layer."""
        missing, ran = self._missing, self.active
        self.abandon()
        assert not (ran and missing), f"the forward pass went past the anchors of layers {sorted(missing)}"

    def abandon(self) -> None:
        """The pass failed; what was saved of it is not whole and is never read."""
        self._pass, self._missing = None, set()

    def _upload(self, numbers: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(numbers)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def locate(lengths: Sequence[int], keeps: Sequence[Keep], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunk numbers [n] and conv windows [n, window] of `keeps`, in a pass over requests of these lengths. int64."""
    chunks_before = np.cumsum([0, *(-(-length // CHUNK) for length in lengths)])
    tokens_before = np.cumsum([0, *lengths])
    requests = np.array([keep.request for keep in keeps], dtype=np.int64)
    chunk = np.array([keep.chunk for keep in keeps], dtype=np.int64)
    inside = chunk * CHUNK
    assert (inside > 0).all() and (inside < np.array(lengths)[requests]).all(), f"no states inside {lengths}: {keeps}"
    ends = tokens_before[requests] + inside
    return chunks_before[requests] + chunk, ends[:, None] + np.arange(-window, 0)
