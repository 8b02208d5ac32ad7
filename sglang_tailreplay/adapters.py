"""SGLang models as groups of replayable layers: one adapter per model family, found from the loaded model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.replay.groups import EMBEDDING, FULL_ATTENTION, LINEAR_ATTENTION, Group, find_groups
from sglang_tailreplay.replay.layers import GdnLayer, Segments

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

Tensor = torch.Tensor
SUPPORTED = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration (text requests)")


class HybridModel(NamedTuple):
    """What the rest of this package knows about a model."""

    groups: tuple[Group, ...]
    layers: tuple[torch.nn.Module, ...]  # SGLang's decoder layers, all of them
    embed: torch.nn.Module  # token ids [T] -> h [T, d]
    hidden_size: int

    @property
    def row_groups(self) -> int:
        """G: groups whose input is stored; the one that starts from the embedding needs no row."""
        return sum(group.source != EMBEDDING for group in self.groups)

    def row_of_layer(self) -> dict[int, int]:
        """First layer of a group -> the group's index in the row store."""
        return {group.layers[0]: group.row for group in self.groups if group.source != EMBEDDING}


def find_model(model: torch.nn.Module) -> HybridModel:
    """The hybrid inside a loaded SGLang model. TailReplayError for a model that no adapter knows."""
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
    from sglang.srt.models.qwen3_5 import Qwen3_5AttentionDecoderLayer, Qwen3_5LinearDecoderLayer

    kinds = {Qwen3_5AttentionDecoderLayer: FULL_ATTENTION, Qwen3_5LinearDecoderLayer: LINEAR_ATTENTION}
    backbone = getattr(model, "model", None)
    layers = tuple(getattr(backbone, "layers", ()))
    if not layers or any(type(layer) not in kinds for layer in layers):
        raise _unknown(model, "its decoder layers are not Qwen3.5's")
    if any(isinstance(layer.mlp, Qwen2MoeSparseMoeBlock) for layer in layers):
        raise _unknown(model, "mixture-of-experts layers are not supported")
    try:
        groups = find_groups([kinds[type(layer)] for layer in layers])
    except ValueError as error:
        raise _unknown(model, str(error)) from None
    return HybridModel(groups, layers, backbone.embed_tokens, backbone.config.hidden_size)


def _unknown(model: torch.nn.Module, why: str) -> TailReplayError:
    return TailReplayError(
        f"model {type(model).__name__}: {why}. Supported: {', '.join(SUPPORTED)}. "
        "Start without --radix-cache-backend tail_replay, or with --tail-replay-mode off."
    )


def replay_layers(model: HybridModel, model_runner: ModelRunner) -> tuple[tuple[Group, tuple[GdnLayer, ...]], ...]:
    """Groups with their layers, ready for a ReplayEngine. Built once the state pools exist."""
    mixer = _Mixer(model_runner)
    return tuple((group, tuple(_qwen3_5_layer(model.layers[i], mixer) for i in group.layers)) for group in model.groups)


class _Mixer:
    """Convolution and gated delta rule over SGLang's state pools, through a backend of our own.

    The model runner's backend holds the metadata of the forward pass that is being prepared; a second GDNAttnBackend
    shares its pools and kernels, not its metadata.
    """

    def __init__(self, model_runner: ModelRunner):
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

        self._backend = GDNAttnBackend(model_runner)
        self._segments: Segments | None = None
        self._batch: SimpleNamespace | None = None

    def __call__(self, attention: torch.nn.Module, qkv: Tensor, a: Tensor, b: Tensor, segments: Segments) -> Tensor:
        """o [T, HV, V]; writes the slots of segments (GDNAttnBackend.forward_extend)."""
        if segments is not self._segments:
            self._prepare(segments)
        o = self._backend.forward_extend(attention, self._batch, qkv, a, b)
        return o.reshape(qkv.shape[0], attention.num_v_heads, attention.head_v_dim)

    def _prepare(self, segments: Segments) -> None:
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import ForwardMetadata
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self._segments = segments
        self._backend.forward_metadata = ForwardMetadata(
            query_start_loc=segments.cu, mamba_cache_indices=segments.slots
        )
        self._batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(segments.lengths),
            # forward_extend asks `> 0`: whether the slot's conv window is the initial one.
            extend_prefix_lens=segments.continues.to(torch.int32),
            extend_seq_lens=segments.cu.diff(),
            extend_seq_lens_cpu=list(segments.lengths),
            extend_start_loc=segments.cu[:-1],
            mamba_track_indices=None,
            mamba_track_mask=None,
            mamba_track_seqlens=None,
            spec_info=None,
        )


def _qwen3_5_layer(layer: torch.nn.Module, mixer: _Mixer) -> GdnLayer:
    """Qwen3_5LinearDecoderLayer: pre-norm, gated norm before out_proj, dense FFN. One rank holds the whole layer."""
    gdn = layer.linear_attn

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _split(gdn, *gdn._forward_input_proj(x))

    def output(o: Tensor, z: Tensor) -> Tensor:
        y = gdn.norm(o.reshape(-1, o.shape[-1]), z.reshape(-1, z.shape[-1]))
        return gdn.out_proj(y.reshape(o.shape[0], -1))[0]

    return GdnLayer(
        index=layer.layer_id,
        input_norm=layer.input_layernorm,
        project=project,
        project_state=_state_projection(gdn),
        mix=lambda qkv, a, b, segments: mixer(gdn.attn, qkv, a, b, segments),
        output=output,
        ffn=lambda h: layer.mlp(layer.post_attention_layernorm(h)),
    )


def _split(gdn: torch.nn.Module, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkvz [T, C + HV*V], ba [T, 2*HV] -> qkv [T, C], z [T, HV, V], b [T, HV], a [T, HV]."""
    z_width = gdn.num_v_heads * gdn.head_v_dim
    qkv, z = qkvz.split((qkvz.shape[1] - z_width, z_width), dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, gdn.num_v_heads, gdn.head_v_dim), b.contiguous(), a.contiguous()


def _state_projection(gdn: torch.nn.Module):
    """x -> qkv, b, a: the z gate is not computed where the weight is a plain matrix, whose first rows are q, k, v."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    plain = isinstance(gdn.in_proj_qkvz.quant_method, UnquantizedLinearMethod)
    width = 2 * gdn.key_dim + gdn.value_dim
    if not plain or tuple(gdn.in_proj_qkvz.weight.shape) != (width + gdn.value_dim, gdn.hidden_size):
        # Quantised or repacked weights cannot be sliced: compute z and drop it.
        def project_all(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            qkv, _, b, a = _split(gdn, *gdn._forward_input_proj(x))
            return qkv, b, a

        return project_all

    def project_state(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Sliced at every call: an online weight update may replace the parameter.
        qkv = functional.linear(x, gdn.in_proj_qkvz.weight[:width])
        b, a = gdn.in_proj_ba(x)[0].chunk(2, dim=-1)
        return qkv, b.contiguous(), a.contiguous()

    return project_state
