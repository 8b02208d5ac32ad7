"""A hybrid of Qwen3.5's layout for training, in plain torch: Gated DeltaNet layers, every n-th layer full attention.

Names of parameters are those of transformers' Qwen3_5ForCausalLM. Weights are float32, activations on a GPU
bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from train.delta_rule import gated_delta_rule


class Linear(nn.Linear):
    """Without bias; computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm with weight 1 + w."""

    def __init__(self, size: int, eps: float, start: float = 0.0):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((size,), start)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight, self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps) * F.silu(z.float())).to(z.dtype)


class ShortConvolution(nn.Module):
    """Causal, one filter per channel; as shifted products, whose backward pass is faster than that of a grouped
    convolution."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, channels]"""
        width, length = self.weight.shape[-1], x.shape[1]
        padded, weight = F.pad(x, (0, 0, width - 1, 0)), self.weight.to(x.dtype)
        return sum(padded[:, i : i + length] * weight[:, 0, i] for i in range(width))


class GatedDeltaNet(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.key_heads, self.heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.sizes = [self.key_heads * self.key_dim] * 2 + [self.heads * self.value_dim]
        self.in_proj_qkv = Linear(hidden, sum(self.sizes))
        self.in_proj_z = Linear(hidden, self.sizes[2])
        self.in_proj_b, self.in_proj_a = Linear(hidden, self.heads), Linear(hidden, self.heads)
        self.conv1d = ShortConvolution(sum(self.sizes), config["linear_conv_kernel_dim"])
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.value_dim, eps)
        self.out_proj = Linear(self.sizes[2], hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs(x, gated_delta_rule(*self.inputs(x)))

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k, v, log-gates and beta of the delta rule."""
        q, k, v = F.silu(self.conv1d(self.in_proj_qkv(x))).split(self.sizes, -1)
        q, k = (
            y.unflatten(-1, (self.key_heads, self.key_dim)).repeat_interleave(self.heads // self.key_heads, 2)
            for y in (q, k)
        )
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        v = v.unflatten(-1, (self.heads, self.value_dim))
        return q, k, v, g, self.in_proj_b(x).float().sigmoid()

    def outputs(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.heads, self.value_dim))
        return self.out_proj(self.norm(out, z).flatten(2))


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        rope = config["rope_parameters"]
        self.rotary, self.theta = int(self.head_dim * rope["partial_rotary_factor"]), rope["rope_theta"]
        self.q_proj = Linear(hidden, self.heads * self.head_dim * 2)  # with the output's gate
        self.k_proj = Linear(hidden, self.kv_heads * self.head_dim)
        self.v_proj = Linear(hidden, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, hidden)
        self.q_norm, self.k_norm = Norm(self.head_dim, eps, 0.25), Norm(self.head_dim, eps, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (y.unflatten(-1, (self.kv_heads, -1)) for y in (self.k_proj(x), self.v_proj(x)))
        q, k = self._rotate(self.q_norm(q)), self._rotate(self.k_norm(k))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 2) for y in (k, v))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads, head_dim], the first `rotary` of the last axis turned by the position."""
        half = self.rotary // 2
        rates = self.theta ** (-torch.arange(half, device=x.device).float() / half)
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(hidden, inner),
            Linear(hidden, inner),
            Linear(inner, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any], kind: str):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.kind = kind
        if kind == "full_attention":
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = FeedForward(hidden, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixer = self.self_attn if self.kind == "full_attention" else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config, kind) for kind in config["layer_types"])
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])


class Hybrid(nn.Module):
    """Logits [B, T, vocabulary] in float32 of ids [B, T]; the head is the embedding."""

    def __init__(self, config: dict[str, Any], seed: int = 0):
        super().__init__()
        self.config, self.model = config, Layers(config)
        generator = torch.Generator().manual_seed(seed)
        outputs = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                width = 1 / math.sqrt(parameter.shape[1])
                scale = 0.5 / math.sqrt(len(self.model.layers)) if name.endswith(outputs) else 0.5
                nn.init.normal_(parameter, std=scale * width, generator=generator)
            elif parameter.dim() == 3:
                nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    @property
    def recurrent(self) -> list[Block]:
        return [layer for layer in self.model.layers if layer.kind == "linear_attention"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self._logits(x)

    def after_replay(self, ids: torch.Tensor, boundary: int, tail: int) -> torch.Tensor:
        """Logits [B, T - boundary, vocabulary] as a server gives them that has the first `boundary` tokens in its cache
        and rebuilds the recurrent states from the last `tail` of them, each group of layers from zero states. 0: the
        states stay zero."""
        x = self.embed(ids)
        cached, new = x[:, :boundary], x[:, boundary:]
        rows = cached[:, boundary - tail :]
        for layer in self.model.layers:
            if layer.kind == "full_attention":
                cached, new = layer(torch.cat([cached, new], 1)).split([boundary, new.shape[1]], 1)
                rows = cached[:, boundary - tail :]
            else:
                rows, new = layer(torch.cat([rows, new], 1)).split([tail, new.shape[1]], 1)
                cached = layer(cached)
        return self._logits(new)

    def _words(self, like: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens.weight.to(torch.bfloat16 if like.is_cuda else torch.float32)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """As a product: the gradient of an embedding of few words adds many tokens into few rows, one by one."""
        words = self._words(ids)
        return (ids[..., None] == torch.arange(len(words), device=ids.device)).to(words.dtype) @ words

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.model.norm(x), self._words(x)).float()
