"""Sizes of hybrids, as fields of transformers' Qwen3_5TextConfig, and how each is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from train import vocabulary


class Stage(NamedTuple):
    share: float  # of the training time
    lengths: tuple[int, ...]  # of sequences, one after the other
    tokens: int  # of a step


@dataclass(frozen=True)
class Recipe:
    layers: int
    interval: int  # every so many layers one is full attention
    sizes: dict[str, Any]
    stages: tuple[Stage, ...]
    rate: float  # of learning, at its highest


TINY = Recipe(
    layers=6,
    interval=3,
    sizes=dict(
        hidden_size=192,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    stages=(
        Stage(0.06, (64,), 1 << 15),
        Stage(0.06, (128, 64), 1 << 15),
        Stage(0.10, (256, 128), 1 << 15),
        Stage(0.16, (512, 256), 1 << 15),
        Stage(0.20, (1024, 512, 256), 1 << 16),
        Stage(0.20, (2048, 1024, 512), 1 << 16),
        Stage(0.22, (4096, 2048, 1024), 1 << 16),
    ),
    rate=2.5e-3,
)
LARGE = Recipe(
    layers=8,
    interval=4,
    sizes=dict(
        hidden_size=320,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    stages=(
        Stage(0.05, (64,), 1 << 15),
        Stage(0.06, (128, 64), 1 << 15),
        Stage(0.10, (256, 128), 1 << 15),
        Stage(0.16, (512, 256), 1 << 15),
        Stage(0.20, (1024, 512, 256), 1 << 16),
        Stage(0.20, (2048, 1024, 512), 1 << 16),
        Stage(0.23, (4096, 2048, 1024), 1 << 16),
    ),
    rate=1.8e-3,
)
# For tests and for looking on at home: learns contexts of 64 to 128 tokens within minutes on two CPU cores.
TOY = Recipe(
    layers=3,
    interval=3,
    sizes=dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    stages=(Stage(0.7, (64,), 1 << 11), Stage(0.3, (128, 64), 1 << 11)),
    rate=5e-3,
)
RECIPES = {"tiny": TINY, "large": LARGE, "toy": TOY}


def config(recipe: Recipe) -> dict[str, Any]:
    """config.json of the model."""
    attention = ("linear_attention",) * (recipe.interval - 1) + ("full_attention",)
    return dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        vocab_size=vocabulary.SIZE,
        num_hidden_layers=recipe.layers,
        full_attention_interval=recipe.interval,
        layer_types=list(attention * (recipe.layers // recipe.interval)),
        **recipe.sizes,
        linear_conv_kernel_dim=4,
        attn_output_gate=True,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        partial_rotary_factor=0.25,  # SGLang reads it here
        mamba_ssm_dtype="float32",
        dtype="bfloat16",
        bos_token_id=vocabulary.BOS,
        eos_token_id=vocabulary.EOS,
        pad_token_id=vocabulary.EOS,
    )
