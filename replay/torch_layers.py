"""GDN layers of a transformers Qwen3.5 model over the naive kernels: the contract of `GdnLayer`, in the plainest form.

The model is taken by its attributes, so this module does not import transformers. Slow; for tests and for reading.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sglang_tailreplay.replay import naive
from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.groups import LINEAR_ATTENTION, find_groups
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class StatePool:
    """States of all GDN layers by layer index. Slots are what a scheduler hands to requests."""

    conv: Mapping[int, Tensor]  # [slots, C, W-1] each
    recurrent: Mapping[int, Tensor]  # [slots, HV, V, K] each

    @classmethod
    def create(cls, model: torch.nn.Module, slots: int, conv_dtype: torch.dtype = torch.float32) -> "StatePool":
        """Uninitialised pool for a transformers model; recurrent states are float32."""
        conv, recurrent = {}, {}
        for index, layer in _gdn_decoder_layers(model).items():
            gdn = layer.linear_attn
            channels, _, width = gdn.conv1d.weight.shape
            conv[index] = torch.empty(slots, channels, width - 1, dtype=conv_dtype)
            shape = (slots, gdn.num_v_heads, gdn.head_v_dim, gdn.head_k_dim)
            recurrent[index] = torch.empty(shape, dtype=torch.float32)
        return cls(conv, recurrent)

    def clear_recurrent(self, slots: Tensor) -> None:
        """Zeroes the recurrent states of `slots` [N]: what the owner of a slot does before a replay."""
        for recurrent in self.recurrent.values():
            recurrent[slots.long()] = 0


def replay_engine(model: torch.nn.Module, pool: StatePool, max_tokens: int, skip_last_ffn: bool = True) -> ReplayEngine:
    """Engine for a transformers `Qwen3_5ForCausalLM` (or its text model's like) that writes its states to `pool`."""
    layers = gdn_layers(model, pool)
    groups = [(group, [layers[i] for i in group.layers]) for group in find_groups(model.config.layer_types)]
    return ReplayEngine(groups, max_tokens, skip_last_ffn)


def gdn_layers(model: torch.nn.Module, pool: StatePool) -> dict[int, GdnLayer]:
    """Every GDN layer of the model by layer index."""
    return {
        index: _gdn_layer(index, layer, pool.conv[index], pool.recurrent[index])
        for index, layer in _gdn_decoder_layers(model).items()
    }


def gdn_weights(model: torch.nn.Module) -> dict[int, naive.GdnWeights]:
    """The same layers as plain tensors, for the naive replay."""
    return {index: _weights(layer) for index, layer in _gdn_decoder_layers(model).items()}


def _gdn_decoder_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    kinds = model.config.layer_types
    return {i: layer for i, layer in enumerate(model.model.layers) if kinds[i] == LINEAR_ATTENTION}


def _gdn_layer(index: int, layer: torch.nn.Module, conv_pool: Tensor, recurrent_pool: Tensor) -> GdnLayer:
    gdn = layer.linear_attn

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gdn.in_proj_qkv(x), gdn.in_proj_b(x), gdn.in_proj_a(x)

    def core(qkv: Tensor, b: Tensor, a: Tensor, segments: Segments) -> Tensor:
        g, beta = naive.gates(a, b, gdn.A_log, gdn.dt_bias)
        weight = gdn.conv1d.weight[:, 0]
        outputs, end = [], 0
        pieces = zip(segments.cu.diff().tolist(), segments.slots.tolist(), segments.continues.tolist(), strict=True)
        for length, slot, continues in pieces:
            part = slice(end, end + length)
            end += length
            if length == 0:
                continue
            window = conv_pool[slot] if continues else torch.zeros_like(conv_pool[slot])
            y, conv = naive.causal_conv(qkv[part], weight, window)
            q, k, v = naive.split_qkv(y.to(qkv.dtype), gdn.num_k_heads, gdn.head_k_dim, gdn.num_v_heads)
            o, recurrent = naive.gated_delta_rule(q, k, v, g[part], beta[part], recurrent_pool[slot])
            conv_pool[slot] = conv.to(conv_pool.dtype)
            recurrent_pool[slot] = recurrent
            outputs.append(o.to(qkv.dtype))
        padding = qkv.new_empty(qkv.shape[0] - end, gdn.num_v_heads, gdn.head_v_dim)
        return torch.cat([*outputs, padding])

    def mix(x: Tensor, segments: Segments) -> Tensor:
        z = gdn.in_proj_z(x).unflatten(1, (gdn.num_v_heads, gdn.head_v_dim))
        o = core(*project(x), segments)
        # Norm and gate are per head: the module takes [T*HV, V].
        return gdn.out_proj(gdn.norm(o.flatten(0, 1), z.flatten(0, 1)).view(o.shape[0], -1))

    def mix_state(x: Tensor, segments: Segments) -> None:
        core(*project(x), segments)

    def added(norm: torch.nn.Module):
        def run(f: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
            h = h if f is None else h + f
            return norm(h), h

        return run

    return GdnLayer(
        index, added(layer.input_layernorm), mix, mix_state, added(layer.post_attention_layernorm), layer.mlp
    )


def _weights(layer: torch.nn.Module) -> naive.GdnWeights:
    gdn, mlp = layer.linear_attn, layer.mlp
    return naive.GdnWeights(
        key_heads=gdn.num_k_heads,
        key_size=gdn.head_k_dim,
        input_norm=1 + layer.input_layernorm.weight.float(),  # stored around zero; the gated norm below is not
        qkv=gdn.in_proj_qkv.weight,
        z=gdn.in_proj_z.weight,
        b=gdn.in_proj_b.weight,
        a=gdn.in_proj_a.weight,
        conv=gdn.conv1d.weight[:, 0],
        A_log=gdn.A_log,
        dt_bias=gdn.dt_bias,
        norm=gdn.norm.weight,
        out=gdn.out_proj.weight,
        post_norm=1 + layer.post_attention_layernorm.weight.float(),
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        eps=layer.input_layernorm.eps,
    )
