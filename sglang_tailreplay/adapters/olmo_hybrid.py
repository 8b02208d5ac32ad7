"""OLMo-Hybrid, a model of this package: its layers offer what a replay needs."""

from __future__ import annotations

import torch

from sglang_tailreplay.adapters.family import Family, pre_norm_layer
from sglang_tailreplay.gdn import Core
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


def gdn_layer(layer: torch.nn.Module, core: Core) -> GdnLayer:
    """OlmoHybridLinearDecoderLayer: pre-norm, plain sums between its parts."""
    gdn = layer.linear_attn

    def mix(x: Tensor, segments: Segments) -> Tensor:
        qkv, gate, b, a = gdn.project(x)
        return gdn.o_proj(core.output(gdn.attn, gdn.o_norm, qkv, gate, b, a, segments))[0]

    def mix_state(x: Tensor, segments: Segments) -> None:
        qkv, b, a = gdn.project_state(x)
        core.state(gdn.attn, qkv, b, a, segments)

    return pre_norm_layer(layer, mix, mix_state, _added)


def _added(norm: torch.nn.Module):
    """f or None, h -> norm(h + f), h + f, rounded between the two as the layer itself rounds."""

    def run(f: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h if f is None else h + f
        return norm(h), h

    return run


FAMILY = Family(
    architectures=("OlmoHybridForCausalLM",),
    attention_layer="sglang_tailreplay.models.olmo_hybrid.OlmoHybridAttentionDecoderLayer",
    linear_layer="sglang_tailreplay.models.olmo_hybrid.OlmoHybridLinearDecoderLayer",
    gdn_layer=gdn_layer,
)
