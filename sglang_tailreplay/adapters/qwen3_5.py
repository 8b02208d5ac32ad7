"""Qwen3.5 and Qwen3.6, dense and mixture-of-experts, text models and the text part of multimodal ones."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_tailreplay.adapters.family import Family, is_plain, pre_norm_layer
from sglang_tailreplay.gdn import Core
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


def gdn_layer(layer: torch.nn.Module, core: Core) -> GdnLayer:
    """Qwen3_5LinearDecoderLayer: pre-norm, gated norm before out_proj. One rank holds the whole layer."""
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

    return pre_norm_layer(layer, mix, mix_state)


def _state_projection(gdn: torch.nn.Module, C: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """qkv [T, C] and ba [T, 2*HV]: the z gate is not computed where the weight is a plain matrix with q, k, v first."""
    if not is_plain(gdn.in_proj_qkvz, (C + gdn.attn.v_dim, gdn.hidden_size)):
        qkvz, ba = gdn._forward_input_proj(x)
        return qkvz[:, :C], ba
    # Sliced at every call: an online weight update may replace the parameter.
    return functional.linear(x, gdn.in_proj_qkvz.weight[:C]), gdn.in_proj_ba(x)[0]


FAMILY = Family(
    architectures=(
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    attention_layer="sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer",
    linear_layer="sglang.srt.models.qwen3_5.Qwen3_5LinearDecoderLayer",
    gdn_layer=gdn_layer,
)
