"""What the engine needs to know about a GDN layer: six callables over the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Segments(NamedTuple):
    """The pieces of one launch, laid one after another along T. Segment i is rows [cu[i], cu[i + 1])."""

    lengths: tuple[int, ...]  # N, each at least 1; the same numbers as cu, for code that must not wait for the device
    cu: Tensor  # [N + 1] int32
    slots: Tensor  # [N] int32: state slot of the segment, no slot twice
    # [N] bool. True: conv and recurrent state in the slot are the initial state.
    # False: the conv window is zero, whatever the slot holds; the recurrent state in the slot was zeroed by its owner.
    continues: Tensor


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """One GDN layer. `h [T, d]` is the residual stream, rounded to the model's dtype between layers."""

    index: int
    # h [T, d] -> x [T, d]
    input_norm: Callable[[Tensor], Tensor]
    # x -> qkv [T, C], z [T, HV, V] or None where the model has no output gate, b [T, HV], a [T, HV]
    project: Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor, Tensor]]
    # x -> qkv [T, C], b [T, HV], a [T, HV]: what the state needs
    project_state: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    # qkv, a, b, segments -> o [T, HV, V]. Convolution and gated delta rule; writes conv and recurrent state of every
    # segment's slot in place and touches no other slot.
    mix: Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
    # o, z -> y [T, d]: gated norm, output projection, reduction over tensor-parallel ranks
    output: Callable[[Tensor, Tensor | None], Tensor]
    # h -> f [T, d]: post norm and MLP, reduced
    ffn: Callable[[Tensor], Tensor]

    def step(self, h: Tensor, segments: Segments) -> Tensor:
        """Residual stream [T, d] that leaves the layer. Writes the states of the segments' slots."""
        qkv, z, b, a = self.project(self.input_norm(h))
        h = h + self.output(self.mix(qkv, a, b, segments), z)
        return h + self.ffn(h)

    def state_only(self, h: Tensor, segments: Segments) -> None:
        """Only writes the states of the segments' slots: no gate, no output projection, no FFN."""
        qkv, b, a = self.project_state(self.input_norm(h))
        self.mix(qkv, a, b, segments)
