"""SGLang models as groups of replayable layers: one adapter per model family, found from the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.gdn import Core, make_core
from sglang_tailreplay.replay.groups import EMBEDDING, FULL_ATTENTION, LINEAR_ATTENTION, Group, find_groups
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

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
    core = make_core(model_runner)
    return tuple((group, tuple(_qwen3_5_layer(model.layers[i], core) for i in group.layers)) for group in model.groups)


def _qwen3_5_layer(layer: torch.nn.Module, core: Core) -> GdnLayer:
    """Qwen3_5LinearDecoderLayer: pre-norm, gated norm before out_proj, dense FFN. One rank holds the whole layer."""
    gdn = layer.linear_attn
    C = gdn.attn.q_dim + gdn.attn.k_dim + gdn.attn.v_dim

    def mix(x: Tensor, segments: Segments) -> Tensor:
        qkvz, ba = gdn._forward_input_proj(x)
        b, a = ba.chunk(2, dim=1)
        y = core.output(gdn.attn, gdn.norm, qkvz[:, :C], qkvz[:, C:], b, a, segments)
        return gdn.out_proj(y)[0]

    def mix_state(x: Tensor, segments: Segments) -> None:
        qkv, ba = _state_projection(gdn, C, x)
        b, a = ba.chunk(2, dim=1)
        core.state(gdn.attn, qkv, b, a, segments)

    return GdnLayer(
        index=layer.layer_id,
        input_norm=_added(layer.input_layernorm),
        mix=mix,
        mix_state=mix_state,
        post_norm=_added(layer.post_attention_layernorm),
        ffn=layer.mlp,
    )


def _added(norm: torch.nn.Module):
    """f or None, h -> norm(h + f), h + f: SGLang's norms add first if they are given a residual, in place."""

    def run(f: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
        return (norm(h), h) if f is None else norm(f, h)

    return run


def _state_projection(gdn: torch.nn.Module, C: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """qkv [T, C] and ba [T, 2*HV]: the z gate is not computed where the weight is a plain matrix with q, k, v first."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    weight = getattr(gdn.in_proj_qkvz, "weight", None)
    plain = isinstance(gdn.in_proj_qkvz.quant_method, UnquantizedLinearMethod)
    if not plain or tuple(weight.shape) != (C + gdn.attn.v_dim, gdn.hidden_size):
        # Quantised or repacked weights cannot be sliced: compute z and drop it.
        qkvz, ba = gdn._forward_input_proj(x)
        return qkvz[:, :C], ba
    # Sliced at every call: an online weight update may replace the parameter.
    return functional.linear(x, weight[:C]), gdn.in_proj_ba(x)[0]
