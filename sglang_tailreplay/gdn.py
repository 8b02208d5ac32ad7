"""The core of a GDN layer on SGLang's state pools: convolution, gates, delta rule and gated norm.

Two of them. `KernelCore` composes SGLang's chunked kernels with those of replay/kernels.py; it can be captured in a
CUDA graph, leaves out what a state does not need, and copies nothing. `BackendCore` asks SGLang's own GDN backend,
whatever that is; it serves machines without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_tailreplay import compat
from sglang_tailreplay.replay.segments import CHUNK, Segments

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

Tensor = torch.Tensor


class GatedNorm(Protocol):
    """SGLang's RMSNormGated."""

    weight: Tensor
    eps: float
    activation: str

    def __call__(self, o: Tensor, z: Tensor) -> Tensor: ...


class Core(Protocol):
    """qkv [T, C], z [T, HV*V], b and a [T, HV]: rows of any stride."""

    def output(
        self,
        layer: RadixLinearAttention,
        norm: GatedNorm,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        segments: Segments,
    ) -> Tensor:
        """What goes into the output projection, [T, HV*V]. Writes the states of the segments' slots."""

    def state(self, layer: RadixLinearAttention, qkv: Tensor, b: Tensor, a: Tensor, segments: Segments) -> None:
        """Writes the same states."""

    def attend_and_keep(
        self, layer: RadixLinearAttention, qkv: Tensor, b: Tensor, a: Tensor, segments: Segments, chunks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """o [1, T, HV, V] before norm and gate, and the recurrent states [n, HV, V, K] float32 before the chunks [n]
        int64 of the launch (numbers in `segments.chunks`). Writes the same states, too."""


def make_core(model_runner: ModelRunner) -> Core:
    cuda = torch.device(model_runner.device).type == "cuda"
    return KernelCore(model_runner) if cuda else BackendCore(model_runner)


class KernelCore:
    """CUDA. The chunked delta rule is SGLang's (chunk_gated_delta_rule_fwd), launched with the segments' own chunks."""

    def __init__(self, model_runner: ModelRunner):
        self._pool = model_runner.req_to_token_pool

    def output(self, layer, norm, qkv, z, b, a, segments):
        from sglang_tailreplay.replay.kernels import gated_norm

        assert norm.activation in ("swish", "silu", "sigmoid"), norm.activation
        o = self.attend(layer, qkv, b, a, segments)
        return gated_norm(o, z, norm.weight, norm.eps, sigmoid_gate=norm.activation == "sigmoid")

    def attend(self, layer: RadixLinearAttention, qkv: Tensor, b: Tensor, a: Tensor, segments: Segments) -> Tensor:
        """o [T, HV, V]; zero for tokens of no segment."""
        return self._delta_rule(layer, *self._prepare(layer, qkv, b, a, segments, queries=True), segments)

    def attend_and_keep(self, layer, qkv, b, a, segments, chunks):
        kept: list[Tensor] = []
        inputs = self._prepare(layer, qkv, b, a, segments, queries=True)
        return self._delta_rule(layer, *inputs, segments, keep=lambda h: kept.append(h[chunks]))[None], kept[0]

    def state(self, layer, qkv, b, a, segments):
        self._delta_rule(layer, *self._prepare(layer, qkv, b, a, segments, queries=False), segments)

    def _prepare(self, layer, qkv, b, a, segments, queries: bool) -> tuple:
        from sglang_tailreplay.replay.kernels import conv_heads, gates

        assert layer.bias is None and layer.activation in ("silu", "swish"), "a convolution that no kernel here does"
        conv = self._pool.mamba2_layer_cache(layer.layer_id).conv[0]
        heads = (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        q, k, v = conv_heads(qkv, layer.conv_weights, conv, segments, heads, queries)
        g, beta = gates(b, a, layer.A_log, layer.dt_bias, segments, getattr(layer, "beta_scale", 1.0))
        return q, k, v, g, beta

    def _delta_rule(
        self, layer, q, k, v, g, beta, segments, keep: Callable[[Tensor], None] | None = None
    ) -> Tensor | None:
        """o [T, HV, V], or None without q. k [T, H, K], v [T, HV, V], g summed up within chunks and beta [1, T, HV].

        `keep` is shown the state before every chunk, [NC, HV, V, K] float32."""
        from sglang.kernels.ops.attention.fla.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        k, v = k[None], v[None]
        w, u, _ = chunk_gated_delta_rule_fwd_intra(
            k=k, v=v, g=g, beta=beta, cu_seqlens=segments.cu, chunk_size=CHUNK, chunk_indices=segments.chunks
        )
        states = self._pool.mamba2_layer_cache(layer.layer_id).temporal
        h, u = _chunk_states(k, w, u, g, states, segments, k.dtype if keep is None else torch.float32)
        if keep is not None:
            keep(h[0])
            h = h.to(k.dtype)
        return _chunk_outputs(q[None], k, u, h, g, segments)[0] if q is not None else None


def _chunk_states(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor, states: Tensor, segments: Segments, h_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The state before every chunk [1, NC, HV, V, K] and the corrected values [1, T, HV, V]; updates states in place.

    The kernel goes on with its own float32 state and rounds only what it writes to h.

    SGLang's chunk_gated_delta_rule_fwd_h would ask the device for the chunk offsets.
    """
    import triton
    from sglang.kernels.ops.attention.fla.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64

    (_, T, H, K), (HV, V), NC = k.shape, u.shape[2:], len(segments.chunks)
    assert states[0].is_contiguous()
    h, corrected = k.new_empty(1, NC, HV, V, K, dtype=h_dtype), torch.empty_like(u)
    N = len(segments.slots)
    chunk_gated_delta_rule_fwd_kernel_h_blockdim64[lambda meta: (triton.cdiv(V, meta["BV"]), N * HV)](
        k=k, v=u, w=w, v_new=corrected, g=g, gk=None, h=h,
        initial_state=states, initial_state_indices=segments.slots, stride_init_state=states.stride(0),
        cu_seqlens=segments.cu, chunk_offsets=segments.chunk_offsets, T=T, H=HV, Hg=H, K=K, V=V, BT=CHUNK,
        USE_G=True, USE_GK=False, USE_INITIAL_STATE=True, INPLACE_UPDATE=True, SAVE_NEW_VALUE=True, IS_VARLEN=True,
        NT_BUCKET=0 if NC <= 32 else 1 if NC <= 128 else 2, USE_EXP2=False,
    )  # fmt: skip
    return h, corrected


def _chunk_outputs(q: Tensor, k: Tensor, u: Tensor, h: Tensor, g: Tensor, segments: Segments) -> Tensor:
    """o [1, T, HV, V]; zero for tokens of no segment. SGLang's chunk_fwd_o, with the segments' own chunks."""
    import triton
    from sglang.kernels.ops.attention.fla.chunk_o import chunk_fwd_kernel_o

    (_, T, H, K), (HV, V) = q.shape, u.shape[2:]
    # Not empty: experts are chosen for every token of a graph, and a router must not see what memory happens to hold.
    o = torch.zeros_like(u)
    chunk_fwd_kernel_o[lambda meta: (triton.cdiv(V, meta["BV"]), len(segments.chunks), HV)](
        q, k, u, h, g, o, segments.cu, segments.chunks, K**-0.5,
        T=T, H=HV, Hg=H, K=K, V=V, BT=CHUNK, BK=128, BV=64, USE_G=True, IS_VARLEN=True, num_warps=4, num_stages=2,
    )  # fmt: skip
    return o


class BackendCore:
    """SGLang's GDNAttnBackend, or what the model has in its place.

    The model runner's own one holds the metadata of the forward pass that is being prepared; a second one shares its
    pools and kernels, not its metadata.
    """

    def __init__(self, model_runner: ModelRunner):
        self._backend = compat.gdn_backend_class(model_runner.model_config)(model_runner)
        self._h: Tensor | None = None  # of the last pass: the state before every chunk [1, NC, HV, V, K]
        self._dispatch = self._backend.kernel_dispatcher.extend

    def attend_and_keep(self, layer, qkv, b, a, segments, chunks):
        self._backend.kernel_dispatcher.extend = self._extend_and_note
        try:
            o = self._extend(layer, qkv, b, a, segments)
        finally:
            del self._backend.kernel_dispatcher.extend
        h, self._h = self._h, None
        assert h is not None, "SGLang's kernel for this machine gives no states inside a pass"
        return o, h[0][chunks]

    def _extend_and_note(self, *args: Any, **kwargs: Any) -> tuple:
        result = self._dispatch(*args, **kwargs)
        self._h = result[2]
        return result

    def output(self, layer, norm, qkv, z, b, a, segments):
        o = self._extend(layer, qkv, b, a, segments)
        heads = (-1, layer.head_v_dim)
        return norm(o.reshape(heads), z.reshape(heads)).reshape(qkv.shape[0], -1)

    def state(self, layer, qkv, b, a, segments):
        self._extend(layer, qkv, b, a, segments)

    def _extend(self, layer, qkv: Tensor, b: Tensor, a: Tensor, segments: Segments) -> Tensor:
        self._backend.forward_metadata = _metadata(segments)
        batch = _batch(segments)
        return self._backend.forward_extend(layer, batch, qkv.contiguous(), a.contiguous(), b.contiguous())


def _metadata(segments: Segments):
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import ForwardMetadata

    return ForwardMetadata(query_start_loc=segments.cu, mamba_cache_indices=segments.slots)


def _batch(segments: Segments) -> SimpleNamespace:
    """The fields of a ForwardBatch that GDNAttnBackend.forward_extend reads."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(segments.lengths),
        # forward_extend asks `> 0`: whether the slot's conv window is the initial one.
        extend_prefix_lens=segments.continues,
        extend_seq_lens=segments.cu.diff(),
        extend_seq_lens_cpu=list(segments.lengths),
        extend_start_loc=segments.cu[:-1],
        mamba_track_indices=None,
        mamba_track_mask=None,
        mamba_track_seqlens=None,
        spec_info=None,
    )
