"""How a recurrent state is kept on the host: as it is, rounded to bfloat16, or as int8 with scales.

    fp32   the pool's own numbers, whatever their dtype: nothing is lost
    bf16   rounded: at most 2^-8 of each number
    int8   one scale per head and key channel, its largest number over 127: at most half a step of 1/127 of that
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor
LEVELS = 127
# Most that a state can be off, as a share of its size (Frobenius norms): half a step in each of V numbers of a channel
# whose largest is one of them, for V up to 128.
LOSS = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.05}


class Stored(NamedTuple):
    """Shape and dtype of one tensor that is kept of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored(name: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Stored, ...]:
    """What is kept of a state [..., HV, V, K] of this dtype."""
    shape = tuple(shape)
    if name == "int8":
        return Stored(shape, torch.int8), Stored((*shape[:-2], shape[-1]), torch.float32)
    return (Stored(shape, torch.bfloat16 if name == "bf16" else dtype),)


def encode(name: str, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """state [..., HV, V, K] as `stored` says; dtype is the pool's."""
    if name == "int8":
        state = state.float()
        largest = state.abs().amax(-2)  # [..., HV, K]
        scale = largest / LEVELS
        step = torch.where(largest > 0, scale, 1.0).unsqueeze(-2)
        return (state / step).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale
    return (state.to(torch.bfloat16 if name == "bf16" else dtype),)


def decode(name: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The state [..., HV, V, K] in the pool's dtype."""
    if name == "int8":
        numbers, scale = parts
        return (numbers.float() * scale.unsqueeze(-2)).to(dtype)
    return parts[0].to(dtype)
