"""What this package has to know about the models of one family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_tailreplay.gdn import Core
from sglang_tailreplay.replay.groups import FULL_ATTENTION, LINEAR_ATTENTION
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import Segments

Tensor = torch.Tensor


class Family(NamedTuple):
    """A family's decoder layers have `layer_id`; those of Gated DeltaNet take `captured_last_layer_outputs`."""

    architectures: tuple[str, ...]  # in config.json
    attention_layer: str  # class of the full-attention decoder layers
    linear_layer: str  # class of the Gated DeltaNet decoder layers
    gdn_layer: Callable[[torch.nn.Module, Core], GdnLayer]  # of a linear_layer

    def layer_kinds(self, layers: Sequence[torch.nn.Module]) -> list[str] | str:
        """Kind of every layer; or why they are not this family's."""
        kinds = {self.attention_layer: FULL_ATTENTION, self.linear_layer: LINEAR_ATTENTION}
        found = []
        for layer in layers:
            name = f"{type(layer).__module__}.{type(layer).__qualname__}"
            if name not in kinds:
                return f"no adapter knows its decoder layer {name}"
            found.append(kinds[name])
        return found


Added = Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]


def pre_norm_layer(
    layer: torch.nn.Module,
    mix: Callable[[Tensor, Segments], Tensor],
    mix_state: Callable[[Tensor, Segments], None],
    add: Callable[[torch.nn.Module], Added] | None = None,
) -> GdnLayer:
    """A decoder layer with a norm before its mixer and one before its FFN; `add` puts a sum into a norm."""
    add = add or added
    return GdnLayer(
        index=layer.layer_id,
        input_norm=add(layer.input_layernorm),
        mix=mix,
        mix_state=mix_state,
        post_norm=add(layer.post_attention_layernorm),
        ffn=layer.mlp,
    )


def added(norm: torch.nn.Module) -> Added:
    """f or None, h -> norm(h + f), h + f: SGLang's norms add first if they are given a residual, in place."""

    def run(f: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
        return (norm(h), h) if f is None else norm(f, h)

    return run


def is_plain(linear: torch.nn.Module, shape: tuple[int, int]) -> bool:
    """Whether a projection's weight is a matrix of that shape, neither quantised nor repacked: rows may be left out."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    return isinstance(linear.quant_method, UnquantizedLinearMethod) and tuple(linear.weight.shape) == shape
