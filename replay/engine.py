"""Replays tails group by group. No policy: `tail.pack` decides what runs together, the caller where rows come from."""

from collections.abc import Callable, Sequence

import torch

from sglang_tailreplay.replay.groups import Group
from sglang_tailreplay.replay.layers import GdnLayer, Segments
from sglang_tailreplay.replay.tail import Launch, pack

Inputs = Callable[[Group, Launch], torch.Tensor]


class ReplayEngine:
    """Rebuilds conv and recurrent state of every GDN layer from the rows of a tail."""

    def __init__(
        self, groups: Sequence[tuple[Group, Sequence[GdnLayer]]], max_tokens: int, skip_last_ffn: bool = True
    ) -> None:
        """`groups` pairs every group with its layers, in the group's order. A launch has at most max_tokens tokens.

        `skip_last_ffn=False` runs a group's last layer whole and drops the result: the ablation of the paper.
        Raises: ValueError where layers and group do not match, or for a budget below 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        for group, layers in groups:
            if tuple(layer.index for layer in layers) != group.layers:
                raise ValueError(f"group wants GDN layers {group.layers}, got {[layer.index for layer in layers]}")
        self.groups = tuple((group, tuple(layers)) for group, layers in groups)
        self.max_tokens = max_tokens
        self.skip_last_ffn = skip_last_ffn

    @torch.no_grad()
    def run(self, tails: Sequence[int], slots: torch.Tensor, inputs: Inputs) -> tuple[Launch, ...]:
        """Replays hit i's tail of tails[i] tokens into state slot slots[i]. Returns the launches that it ran.

        `slots` is [hits] int32 on the model's device, no slot twice; the owner has zeroed their recurrent states on the
        current stream. `inputs(group, launch)` gives h [launch.tokens, d], the rows of the launch's pieces one after
        another; it is the place where the caller waits for the fetched rows. It is called launch by launch, and within
        a launch group by group. Runs on the current stream and never waits for the device.
        """
        if slots.shape != (len(tails),):
            raise ValueError(f"one slot per tail: {len(tails)} tails, slots of shape {tuple(slots.shape)}")
        launches = pack(tails, self.max_tokens)
        for launch in launches:
            segments = segments_of(launch, slots)
            for group, layers in self.groups:
                h = inputs(group, launch)
                assert h.shape[0] == launch.tokens, (group, tuple(h.shape), launch.tokens)
                self._replay(layers, h, segments)
        return launches

    def _replay(self, layers: tuple[GdnLayer, ...], h: torch.Tensor, segments: Segments) -> None:
        *inner, last = layers
        for layer in inner:
            h = layer.step(h, segments)
        if self.skip_last_ffn:
            last.state_only(h, segments)
        else:
            last.step(h, segments)


def segments_of(launch: Launch, slots: torch.Tensor) -> Segments:
    """Segments of a launch; `slots` [hits] has the slot of every hit. Does not wait for the device."""
    pieces = launch.pieces
    lengths = tuple(piece.length for piece in pieces)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return Segments(
        lengths=lengths,
        cu=_to_device(ends, torch.int32, slots.device),
        slots=slots[pieces[0].hit : pieces[-1].hit + 1],  # consecutive hits: see Launch
        continues=_to_device([piece.continues for piece in pieces], torch.bool, slots.device),
    )


def _to_device(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small tensor through pinned memory: from pageable memory the copy would wait for the stream."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
