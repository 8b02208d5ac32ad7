"""Which tensors an OLMo-Hybrid checkpoint has, and where each goes.

Loading is strict: nothing may be missing, left over, or of another shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from sglang_tailreplay.replay.groups import LINEAR_ATTENTION


class Destination(NamedTuple):
    parameter: str  # of the model
    shard: int | str | None  # which part of a fused parameter; None for all of it
    shape: tuple[int, ...]  # of the tensor in the checkpoint


def destinations(config: Any) -> dict[str, Destination]:
    """Every tensor of a checkpoint by its name. config: OlmoHybridConfig."""
    d, vocabulary = config.hidden_size, config.vocab_size
    found = {
        "model.embed_tokens.weight": Destination("model.embed_tokens.weight", None, (vocabulary, d)),
        "model.norm.weight": Destination("model.norm.weight", None, (d,)),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = Destination("lm_head.weight", None, (vocabulary, d))
    for index, kind in enumerate(config.layer_types):
        layer = _gdn_layer(config) if kind == LINEAR_ATTENTION else _attention_layer(config)
        for name, (parameter, shard, shape) in (layer | _mlp(config)).items():
            found[f"model.layers.{index}.{name}"] = Destination(f"model.layers.{index}.{parameter}", shard, shape)
    return found


def _gdn_layer(config: Any) -> dict[str, tuple]:
    d, keys, values = config.hidden_size, config.key_dim, config.value_dim
    heads, width = config.linear_num_value_heads, config.linear_conv_kernel_dim
    layer = {
        "input_layernorm.weight": ("input_layernorm.weight", None, (d,)),
        "post_attention_layernorm.weight": ("post_attention_layernorm.weight", None, (d,)),
        "linear_attn.A_log": ("linear_attn.A_log", None, (heads,)),
        "linear_attn.dt_bias": ("linear_attn.dt_bias", None, (heads,)),
        "linear_attn.o_norm.weight": ("linear_attn.o_norm.weight", None, (config.linear_value_head_dim,)),
        "linear_attn.o_proj.weight": ("linear_attn.o_proj.weight", None, (d, values)),
        "linear_attn.b_proj.weight": ("linear_attn.in_proj_ba.weight", 0, (heads, d)),
        "linear_attn.a_proj.weight": ("linear_attn.in_proj_ba.weight", 1, (heads, d)),
    }
    for shard, (name, size) in enumerate((("q", keys), ("k", keys), ("v", values), ("g", values))):
        layer[f"linear_attn.{name}_proj.weight"] = ("linear_attn.in_proj_qkvg.weight", shard, (size, d))
        if name != "g":
            layer[f"linear_attn.{name}_conv1d.weight"] = ("linear_attn.conv_weight", shard, (size, 1, width))
    return layer


def _attention_layer(config: Any) -> dict[str, tuple]:
    d = config.hidden_size
    head = d // config.num_attention_heads
    sizes = {"q": config.num_attention_heads * head}
    sizes["k"] = sizes["v"] = config.num_key_value_heads * head
    layer = {
        "post_attention_layernorm.weight": ("post_attention_layernorm.weight", None, (d,)),
        "post_feedforward_layernorm.weight": ("post_feedforward_layernorm.weight", None, (d,)),
        "self_attn.q_norm.weight": ("self_attn.q_norm.weight", None, (sizes["q"],)),
        "self_attn.k_norm.weight": ("self_attn.k_norm.weight", None, (sizes["k"],)),
        "self_attn.o_proj.weight": ("self_attn.o_proj.weight", None, (d, sizes["q"])),
    }
    for name, size in sizes.items():
        layer[f"self_attn.{name}_proj.weight"] = ("self_attn.qkv_proj.weight", name, (size, d))
        if config.attention_bias:
            layer[f"self_attn.{name}_proj.bias"] = ("self_attn.qkv_proj.bias", name, (size,))
    if config.attention_bias:
        layer["self_attn.o_proj.bias"] = ("self_attn.o_proj.bias", None, (d,))
    return layer


def _mlp(config: Any) -> dict[str, tuple]:
    d, f = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0, (f, d)),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", 1, (f, d)),
        "mlp.down_proj.weight": ("mlp.down_proj.weight", None, (d, f)),
    }


def load(model: torch.nn.Module, config: Any, weights: Iterable[tuple[str, torch.Tensor]], complete: bool) -> None:
    """Copy the tensors into the model's parameters, this rank's part of each.

    complete: all of a checkpoint's tensors must come; else any of them may, as in an update of a running model.
    Raises: ValueError with the name of a tensor that is unknown, comes twice, has another shape, or is missing.
    """
    wanted = destinations(config)
    parameters = dict(model.named_parameters())
    seen: set[str] = set()
    for name, tensor in _canonical(weights, config):
        destination = wanted.get(name)
        if destination is None:
            raise ValueError(f"checkpoint: tensor {name} is not one of an OLMo-Hybrid model with this config.json")
        if name in seen:
            raise ValueError(f"checkpoint: tensor {name} comes twice")
        if tuple(tensor.shape) != destination.shape:
            raise ValueError(
                f"checkpoint: tensor {name} has shape {tuple(tensor.shape)}, config.json says {destination.shape}"
            )
        seen.add(name)
        parameter = parameters[destination.parameter]
        shard = () if destination.shard is None else (destination.shard,)
        parameter.weight_loader(parameter, tensor, *shard)
    missing = [name for name in wanted if name not in seen]
    if complete and missing:
        raise ValueError(f"checkpoint: {len(missing)} tensors are missing, the first is {missing[0]}")


def _canonical(weights: Iterable[tuple[str, torch.Tensor]], config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of transformers' modules, without those that the model has no use for.

    Checkpoints have other names for two of the norms, and some versions of transformers one convolution over q, k, v.
    """
    for name, tensor in weights:
        if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = name.replace(".attention_layer_norm.", ".input_layernorm.")
        name = name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
        if name.endswith(".linear_attn.conv1d.weight"):
            yield from _split_convolution(name, tensor, config)
        else:
            yield name, tensor


def _split_convolution(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = (config.key_dim, config.key_dim, config.value_dim)
    shape = (sum(sizes), 1, config.linear_conv_kernel_dim)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"checkpoint: tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
    for part, piece in zip("qkv", tensor.split(sizes), strict=True):
        yield name.replace(".conv1d.", f".{part}_conv1d."), piece
