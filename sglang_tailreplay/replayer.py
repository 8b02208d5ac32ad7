"""Rebuilding the states of a batch's hits: fetches rows on the copy lane, replays on the replay lane.

    forward lane   ... clear slots | attention's plans ...  wait replayed | prefill of the suffixes
    copy lane                      | rows g=1 | rows g=2 | ...
    replay lane      wait cleared  | g=0 | wait rows, g=1 | ...  replayed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.groups import EMBEDDING
from sglang_tailreplay.replay.tail import Launch

if TYPE_CHECKING:
    from sglang_tailreplay.anchor_store import AnchorStore
    from sglang_tailreplay.cuda_streams.gates import Gate
    from sglang_tailreplay.cuda_streams.lanes import Event, Lanes
    from sglang_tailreplay.cuda_streams.mover import Fetched, RowMover
    from sglang_tailreplay.metrics import Stopwatch
    from sglang_tailreplay.step import Hit


class Replayer:
    def __init__(
        self,
        engine: ReplayEngine,
        embed: torch.nn.Module,
        mover: RowMover,
        lanes: Lanes,
        stopwatch: Stopwatch,
        gates: Sequence[Gate] = (),
        anchors: AnchorStore | None = None,
        poison: bool = False,
    ):
        """`gates`: one per group, opened when the group's states are there; none where nobody waits for them.
        `poison`: what was read is overwritten with NaN, so that whoever reads it too early or too late is found out.
        """
        self.engine = engine
        self.embed = embed
        self.mover = mover
        self.lanes = lanes
        self.stopwatch = stopwatch
        self.gates = gates
        self.anchors = anchors
        self.poison = poison
        self._replayed: Event | None = None
        self.free: dict[int, Event] = {}  # address of an input buffer -> after its last replay

    @torch.no_grad()
    def run(self, hits: Sequence[Hit], slots: torch.Tensor) -> None:
        """Rebuild every hit's states in slots [hits], see `slots_of`, which were zeroed on the current stream.

        `wait` must follow before anything on the current stream reads them.
        """
        seeds = [(i, hit.anchor) for i, hit in enumerate(hits) if hit.anchor is not None]
        fetched = self.anchors.fetch([anchor for _, anchor in seeds]) if seeds else None
        tailed = [hit for hit in hits if len(hit.rows)]
        # Made on this stream, before the mark.
        tail_slots = slots if len(tailed) == len(hits) else slots_of(tailed)
        seed_slots = slots if len(seeds) == len(hits) else slots_of([hits[i] for i, _ in seeds])
        cleared = self.lanes.mark_current("slots cleared")
        with self.lanes.replay.after(cleared):
            self.lanes.replay.reads(slots, tail_slots, seed_slots)
            if fetched is not None:
                self.anchors.restore(fetched, seed_slots)
            with self.stopwatch.measure("replay"):
                self._replay(tailed, tail_slots)
            self._replayed = self.lanes.replay.record("states replayed")

    def _replay(self, hits: Sequence[Hit], slots: torch.Tensor) -> None:
        """On the replay lane; every hit has a tail. Opens the gates."""
        if not hits:
            for gate in self.gates:
                gate.open(self.lanes.replay)
            return
        launches = self.engine.plan([len(hit.rows) for hit in hits], [hit.anchor is not None for hit in hits])
        inputs = _Inputs(self, hits, launches, slots.device)
        self.engine.run(launches, slots, inputs)
        inputs.close()

    @property
    def pending(self) -> bool:
        """Whether there are states that the current stream has not waited for."""
        return self._replayed is not None

    def wait(self, behind_gates: bool = False) -> None:
        """The current stream waits for the states, as late as it can.

        What SGLang prepares for the pass asks the device for lengths and would have the host wait for the replay, too.
        `behind_gates`: what comes next on the stream waits at the gate of every group itself.
        """
        if self._replayed is not None and not (behind_gates and self.gates):
            with self.stopwatch.measure("wait"):
                self.lanes.current_waits(self._replayed)
        self._replayed = None


class _Turn(NamedTuple):
    """One group of one launch."""

    launch: Launch
    number: int  # of the group in the engine


class _Inputs:
    """h [T, d] of every group of every launch, fetched one group ahead of the replay."""

    def __init__(self, replayer: Replayer, hits: Sequence[Hit], launches: Sequence[Launch], device: torch.device):
        self._owner, self._device = replayer, device
        self._groups = [group for group, _ in replayer.engine.groups]
        self._rows = [hit.rows for hit in hits]
        self._tokens = [hit.token_ids for hit in hits]
        stored = [number for number, group in enumerate(self._groups) if group.source != EMBEDDING]
        # What to fetch, in the order in which it is replayed.
        self._plan = [_Turn(launch, number) for launch in launches for number in stored]
        self._ids: dict[Launch, torch.Tensor] = {}
        self._fetched: dict[_Turn, Fetched] = {}
        self._in_use: torch.Tensor | None = None  # the input buffer that the last group was given
        self._turn: _Turn | None = None  # the last group that was given its input
        self._last_launch = launches[-1]
        self._fetch_next()

    def __call__(self, number: int, launch: Launch) -> torch.Tensor:
        """The input of a group, on the replay lane, which has been given all groups before it."""
        self._release()
        turn = _Turn(launch, number)
        stored = self._groups[number].source != EMBEDDING
        if stored and turn not in self._fetched:
            self._fetch_next()
        fetched = self._fetched.pop(turn) if stored else None
        buffer = self._in_use = self._owner.engine.input_buffer(number, launch)
        self._turn = turn
        if not self._fetched:
            self._fetch_next()
        if fetched is None:
            return self._embedded(launch, buffer)
        self._owner.lanes.current_waits(fetched.ready)  # the current stream is the replay lane's
        return fetched.tensor

    def close(self) -> None:
        self._release()

    def _release(self) -> None:
        """The replay lane is done with the last group when it gets here."""
        gates, turn = self._owner.gates, self._turn
        if gates and turn is not None and turn.launch is self._last_launch:
            gates[turn.number].open(self._owner.lanes.replay)
        if self._in_use is not None:
            if self._owner.poison:
                self._in_use.fill_(float("nan"))
            self._owner.free[self._in_use.data_ptr()] = self._owner.lanes.replay.record("input replayed")
            self._in_use = None

    def _embedded(self, launch: Launch, buffer: torch.Tensor | None) -> torch.Tensor:
        ids = torch.from_numpy(_gather(launch, self._tokens))
        if self._device.type == "cuda":
            ids = ids.pin_memory().to(self._device, non_blocking=True)
        h = self._owner.embed(ids)
        return h if buffer is None else buffer.copy_(h)

    def _fetch_next(self) -> None:
        if not self._plan:
            return
        turn = self._plan[0]
        out = self._owner.engine.input_buffer(turn.number, turn.launch)
        if out is not None and self._in_use is not None and out.data_ptr() == self._in_use.data_ptr():
            return  # the group at hand has it; its own turn comes back here
        self._plan.pop(0)
        self._fetched[turn] = self._fetch(turn, out)

    def _fetch(self, turn: _Turn, out: torch.Tensor | None) -> Fetched:
        owner = self._owner
        ids = self._ids.get(turn.launch)
        if ids is None:
            ids = self._ids[turn.launch] = owner.mover.upload(_gather(turn.launch, self._rows))
        free = owner.free.get(out.data_ptr()) if out is not None else None
        with owner.lanes.copy.after(), owner.stopwatch.measure("fetch"):
            return owner.mover.fetch(
                [self._groups[turn.number].row],
                ids,
                out=out[None] if out is not None else None,
                after=(free,) if free is not None else (),
            )[0]


def slots_of(hits: Sequence[Hit]) -> torch.Tensor:
    """State slots [hits], in SGLang's own integers: what reads them converts them in the copy that it makes anyway."""
    return torch.stack([hit.slot for hit in hits]) if hits else torch.empty(0, dtype=torch.int64)


def _gather(launch: Launch, per_hit: Sequence[np.ndarray]) -> np.ndarray:
    """The launch's pieces of per-token data, one after another: [launch.tokens]."""
    return np.concatenate([per_hit[piece.hit][piece.start : piece.end] for piece in launch.pieces])
