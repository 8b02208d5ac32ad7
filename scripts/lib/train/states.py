"""States that a replay of a tail gives, beside those of a full prefill: plain torch, without a server.

Only layers with the attributes of model.py's blocks. [0, m) is the cached prefix, m a multiple of 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from train.delta_rule import CHUNK, with_states
from train.model import Block, Hybrid


class LayerStates(NamedTuple):
    out: torch.Tensor  # [B, T, d]: what leaves the layer
    window: torch.Tensor  # [B, W-1, C]: the last inputs of the convolution
    states: torch.Tensor  # [B, H, N + 1, K, V]: recurrent ones before each chunk and after the last one
    gates: torch.Tensor  # [B, T, H]: log of what a token leaves of the state


class Errors(NamedTuple):
    """Of a tail of k tokens, in one layer; relative ones are norms of the difference over norms of the right state."""

    layer: int
    place: int  # within the group: its first layer's inputs are exact
    tail: int
    recurrent: torch.Tensor  # [B, H] relative
    conv: torch.Tensor  # [B] relative
    kept: torch.Tensor  # [B, H]: exp(sum of the log-gates over the tail)
    bound: torch.Tensor  # [B, H]: kept x norm of the state before the tail, relative as `recurrent`


def run(block: Block, x: torch.Tensor) -> LayerStates:
    gdn = block.linear_attn
    normed = block.input_layernorm(x)
    q, k, v, g, beta = gdn.inputs(normed)
    out, states = with_states(q, k, v, g, beta)
    window = gdn.in_proj_qkv(normed)[:, 1 - gdn.conv1d.weight.shape[-1] :]
    x = x + gdn.outputs(normed, out)
    return LayerStates(x + block.mlp(block.post_attention_layernorm(x)), window, states, g)


@torch.no_grad()
def errors(model: Hybrid, ids: torch.Tensor, tails: Sequence[int]) -> Iterator[Errors]:
    """ids [B, m]; tails that are multiples of 64 and shorter than m."""
    length = ids.shape[1]
    if length % CHUNK or any(tail % CHUNK or not 0 < tail < length for tail in tails):
        raise ValueError(f"prefix ({length}) and tails ({tails}) must be multiples of {CHUNK}, tails the shorter ones")
    x, place = model.embed(ids), 0
    replayed = {tail: x[:, length - tail :] for tail in tails}  # what a group is replayed from
    for number, block in enumerate(model.model.layers):
        if block.kind == "full_attention":
            x, place = block(x), 0
            replayed = {tail: x[:, length - tail :] for tail in tails}
            continue
        full = run(block, x)
        for tail in tails:
            part = run(block, replayed[tail])
            replayed[tail] = part.out
            yield _compare(number, place, tail, full, part)
        x, place = full.out, place + 1


def _compare(layer: int, place: int, tail: int, full: LayerStates, part: LayerStates) -> Errors:
    right = full.states[:, :, -1]
    size = right.flatten(2).norm(dim=2)
    kept = full.gates[:, -tail:].sum(1).exp()
    missing = full.states[:, :, -1 - tail // CHUNK].flatten(2).norm(dim=2)
    window = full.window.float().flatten(1)
    return Errors(
        *(layer, place, tail),
        recurrent=(part.states[:, :, -1] - right).flatten(2).norm(dim=2) / size,
        conv=(part.window.float().flatten(1) - window).norm(dim=1) / window.norm(dim=1),
        kept=kept,
        bound=kept * missing / size,
    )
