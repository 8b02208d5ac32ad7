"""GDN layers inside SGLang's prefill graphs.

SGLang's breakable graphs stop at every attention layer, GDN layers included, and launch their dozen kernels one by
one: three quarters of a hybrid model's layers, and most of what a short prefill costs the host. With the segments of a
pass in fixed memory the GDN layers become part of the graphs; only full attention is left outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from sglang_tailreplay.gdn import KernelCore
from sglang_tailreplay.replay.segments import CHUNK, NO_SLOT, SegmentTable
from sglang_tailreplay.replay.tail import Launch, Piece

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_tailreplay.cuda_streams.gates import Gate

Tensor = torch.Tensor
MAX_REQUESTS = 32  # of a pass in a graph; every one of them costs each layer a few empty programs


class PrefillGraphs:
    """One forward pass at a time, on the forward stream."""

    def __init__(
        self,
        core: KernelCore,
        pool: HybridReqToTokenPool,
        max_tokens: int,
        device: torch.device,
        gates: Mapping[int, Gate],
    ):
        """`gates` by GDN layer: what has to be open before the layer, and those behind it, read states."""
        self._gates = gates
        self._core = core
        self._pool = pool
        self._device = device
        self._table = SegmentTable(MAX_REQUESTS, max_tokens // CHUNK + MAX_REQUESTS, device)

    def fits(self, forward_batch: ForwardBatch) -> bool:
        return forward_batch.batch_size <= MAX_REQUESTS

    def load_for_capture(self, tokens: int) -> None:
        """A graph of that many tokens is going to be captured: one request that has no state."""
        nowhere = torch.full((1,), NO_SLOT, dtype=torch.int32, device=self._device)
        self._table.load(Launch((Piece(0, 0, tokens, continues=False),)), nowhere)

    def load(self, forward_batch: ForwardBatch) -> None:
        """A graph is going to run for this batch."""
        slots = self._pool.get_mamba_indices(forward_batch.req_pool_indices)
        slots = self._pool.translate_mamba_indices(slots).to(torch.int32)
        self._table.load(launch_of(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu), slots)

    def attend(self, layer: RadixLinearAttention, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """o [1, T, HV, V] for the loaded pass (RadixLinearAttention.forward). T is the graph's; what is behind the
        pass's own tokens is undefined."""
        gate = self._gates.get(layer.layer_id)
        if gate is not None:
            gate.wait()
        return self._core.attend(layer, qkv, b, a, self._table.whole(qkv.shape[0]))[None]


def launch_of(lengths: list[int], prefixes: list[int]) -> Launch:
    """The requests of a prefill batch: the new tokens of each, and how many tokens its state stands for already."""
    pairs = zip(lengths, prefixes, strict=True)
    return Launch(tuple(Piece(i, 0, length, continues=prefix > 0) for i, (length, prefix) in enumerate(pairs)))
