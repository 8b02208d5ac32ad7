"""Replays tails group by group. No policy: `tail.pack` decides what runs together, the caller where rows come from."""

from collections.abc import Callable, Sequence

import torch

from sglang_tailreplay.replay.groups import Group
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import CHUNK, Segments, SegmentTable
from sglang_tailreplay.replay.tail import Launch, pack

# number of the group, launch -> h [launch.tokens, d]
Inputs = Callable[[int, Launch], torch.Tensor]
MAX_SEGMENTS = 16  # hits that are replayed together; more follow in the next launch


class ReplayEngine:
    """Rebuilds conv and recurrent state of every GDN layer from the rows of a tail, kernel by kernel."""

    def __init__(
        self,
        groups: Sequence[tuple[Group, Sequence[GdnLayer]]],
        max_tokens: int,
        skip_last_ffn: bool = True,
        device: torch.device | str = "cpu",
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
        self._table = SegmentTable(MAX_SEGMENTS, max_tokens // CHUNK + MAX_SEGMENTS, torch.device(device))

    def plan(self, tails: Sequence[int], seeded: Sequence[bool] | None = None) -> tuple[Launch, ...]:
        """The launches that replay tails of these lengths, from zero or from the state in the slot (see `pack`)."""
        return pack(tails, self.max_tokens, MAX_SEGMENTS, seeded)

    def input_buffer(self, number: int, launch: Launch) -> torch.Tensor | None:
        """Where the input [launch.tokens, d] of a group has to lie; None: anywhere."""
        return None

    @torch.no_grad()
    def run(self, launches: Sequence[Launch], slots: torch.Tensor, inputs: Inputs) -> None:
        """Replays the launches of `plan`; hit i's states are those of slot slots[i].

        `slots` is [hits], integers on the device, no slot twice; on the current stream the owner has zeroed their
        recurrent states, or put the states there that the tails continue. `inputs(number, launch)` gives h
        [launch.tokens, d] for the group of that number, the rows of the launch's pieces one after another, to be
        overwritten; it is the place where the caller waits for the fetched rows. It is called launch by launch, and
        within a launch group by group. Runs on the current stream and never waits for the device.
        """
        hits = launches[-1].pieces[-1].hit + 1 if launches else 0
        if slots.shape != (hits,):
            raise ValueError(f"one slot per tail: {hits} tails, slots of shape {tuple(slots.shape)}")
        for launch in launches:
            self._table.load(launch, slots)
            for number in range(len(self.groups)):
                h = inputs(number, launch)
                assert h.shape[0] == launch.tokens, (number, tuple(h.shape), launch.tokens)
                self._replay(number, launch, h)

    def _replay(self, number: int, launch: Launch, h: torch.Tensor) -> None:
        """Replays one group of the loaded launch."""
        self._replay_layers(number, h, self._table.exact(launch))

    def _replay_layers(self, number: int, h: torch.Tensor, segments: Segments) -> None:
        *inner, last = self.groups[number][1]
        f = None
        for layer in inner:
            f, h = layer.step(f, h, segments)
        if self.skip_last_ffn:
            last.state_only(f, h, segments)
        else:
            last.step(f, h, segments)
