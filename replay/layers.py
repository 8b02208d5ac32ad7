"""What the engine needs to know about a GDN layer: five callables over the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """One GDN layer.

    `h [T, d]` is the residual stream in the model's dtype, `f [T, d]` what is still to be added to it: kernels add and
    normalise in one pass. What becomes of tokens that belong to no segment is not read; `mix` gives numbers for them.
    """

    index: int
    # f or None, h -> norm(h + f), h + f. May write into f and h.
    input_norm: Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]
    # x [T, d], segments -> y [T, d]: projections, convolution, gated delta rule, gated norm, output projection. Writes
    # conv and recurrent state of every segment's slot in place and touches no other slot.
    mix: Callable[[Tensor, Segments], Tensor]
    # x, segments: writes the same states and computes nothing that they do not need
    mix_state: Callable[[Tensor, Segments], None]
    # y [T, d], h -> norm(h + y), h + y. May write into y and h.
    post_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    # x [T, d] -> f [T, d]
    ffn: Callable[[Tensor], Tensor]

    def step(self, f: Tensor | None, h: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """f, h -> f, h behind the layer. Writes the states of the segments' slots."""
        x, h = self.input_norm(f, h)
        x, h = self.post_norm(self.mix(x, segments), h)
        return self.ffn(x), h

    def state_only(self, f: Tensor | None, h: Tensor, segments: Segments) -> None:
        """Only writes the states of the segments' slots: no gate, no output projection, no FFN."""
        x, _ = self.input_norm(f, h)
        self.mix_state(x, segments)
