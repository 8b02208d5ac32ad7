"""Qwen3-Next. As Qwen3.5, but the input projections are grouped by key head."""

from __future__ import annotations

import torch

from sglang_tailreplay.adapters.family import Family, pre_norm_layer
from sglang_tailreplay.gdn import Core
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


def gdn_layer(layer: torch.nn.Module, core: Core) -> GdnLayer:
    """Qwen3HybridLinearDecoderLayer. One rank holds the whole layer."""
    gdn = layer.linear_attn

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [T, C], z [T, HV*V], b and a [T, HV]. The rows of q, k, v and z alternate in the weight: z cannot be left
        out without a copy of the others."""
        q, k, v, z, b, a = gdn.fix_query_key_value_ordering(*gdn._forward_input_proj(x))
        return torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), z.flatten(1), b, a

    def mix(x: Tensor, segments: Segments) -> Tensor:
        qkv, z, b, a = project(x)
        return gdn.out_proj(core.output(gdn.attn, gdn.norm, qkv, z, b, a, segments))[0]

    def mix_state(x: Tensor, segments: Segments) -> None:
        qkv, _, b, a = project(x)
        core.state(gdn.attn, qkv, b, a, segments)

    return pre_norm_layer(layer, mix, mix_state)


FAMILY = Family(
    architectures=("Qwen3NextForCausalLM",),
    attention_layer="sglang.srt.models.qwen3_next.Qwen3HybridAttentionDecoderLayer",
    linear_layer="sglang.srt.models.qwen3_next.Qwen3HybridLinearDecoderLayer",
    gdn_layer=gdn_layer,
)
