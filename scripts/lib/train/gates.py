"""How long the heads remember, and a limit to it that the weights themselves keep.

A token keeps exp(-exp(A_log) * softplus(a + dt_bias)) of a head's state, a being a projection of the layer's normed
input. A normed input x has |x / (1 + weight)| <= sqrt(hidden size), so that |a| <= sqrt(hidden size) * |row * (1 +
weight)|: a bound over every possible token, from the weights alone. Limiting it and raising A_log where needed gives
weights under which no head keeps half of what it holds for more than `limit` tokens, in any engine that serves them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

REACH = 2.0  # most that a token can move a gate's argument, where half-lives are limited
MARGIN = 1.02  # for bfloat16: of the normed input and of its projection


class HalfLives(NamedTuple):
    """In tokens, one per head: [HV] each."""

    typical: torch.Tensor  # where the projection is zero
    longest: torch.Tensor  # of any token


def half_lives(layer: nn.Module) -> HalfLives:
    """`layer` has input_layernorm and linear_attn, as the blocks of model.py do."""
    gdn, rate = layer.linear_attn, layer.linear_attn.A_log.double().exp()
    bias = gdn.dt_bias.double()
    slowest = F.softplus(bias - _reach(layer).double())
    return HalfLives(math.log(2) / (rate * F.softplus(bias)), math.log(2) / (rate * slowest))


def _reach(layer: nn.Module) -> torch.Tensor:
    scaled = layer.linear_attn.in_proj_a.weight * (1 + layer.input_layernorm.weight)
    return scaled.norm(dim=1) * (math.sqrt(scaled.shape[1]) * MARGIN)


@torch.no_grad()
def limit_half_lives(layers: Iterable[nn.Module], limit: float) -> None:
    """Changes in_proj_a and A_log so that half_lives(layer).longest <= limit. Never waits for a GPU."""
    for layer in layers:
        gdn = layer.linear_attn
        gdn.in_proj_a.weight.mul_((REACH / _reach(layer)).clamp(max=1)[:, None])
        slowest = F.softplus(gdn.dt_bias.float() - _reach(layer))
        gdn.A_log.copy_(torch.maximum(gdn.A_log, (math.log(2) / limit / slowest).log() + 1e-5))


def spread_half_lives(layer: nn.Module, low: float, high: float, generator: torch.Generator) -> None:
    """Sets the typical half-lives of a new layer: log-uniform from low to high tokens."""
    gdn = layer.linear_attn
    with torch.no_grad():
        drawn = torch.rand(gdn.A_log.shape, generator=generator)
        wanted = low * (high / low) ** drawn
        gdn.dt_bias.fill_(2.0)
        gdn.A_log.copy_((math.log(2) / wanted / math.log1p(math.exp(2.0))).log())
