"""Rebuilding the states of a batch's hits: fetches rows on the copy lane, replays on the replay lane.

    forward lane   ... clear slots |                        wait replayed | prefill of the suffixes
    copy lane                      | rows g=1 | rows g=2 | ...
    replay lane      wait cleared  | g=0 | wait rows, g=1 | ...  replayed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.groups import EMBEDDING, Group
from sglang_tailreplay.replay.tail import Launch, pack

if TYPE_CHECKING:
    from sglang_tailreplay.cuda_streams.lanes import Lanes
    from sglang_tailreplay.cuda_streams.mover import Fetched, RowMover
    from sglang_tailreplay.metrics import Stopwatch
    from sglang_tailreplay.scheduling import Hit


class Replayer:
    def __init__(
        self, engine: ReplayEngine, embed: torch.nn.Module, mover: RowMover, lanes: Lanes, stopwatch: Stopwatch
    ):
        self._engine = engine
        self._embed = embed
        self._mover = mover
        self._lanes = lanes
        self._stopwatch = stopwatch

    @torch.no_grad()
    def run(self, hits: Sequence[Hit], slots: torch.Tensor) -> None:
        """Rebuild every hit's states in slots [hits] int32, which were zeroed on the current stream.

        On return the current stream waits for them.
        """
        with self._stopwatch.measure("wait"):
            cleared = self._lanes.mark_current("slots cleared")
            inputs = _Inputs(self._engine, hits, self._embed, self._fetch, self._lanes, slots.device)
            with self._lanes.replay.after(cleared):
                self._lanes.replay.reads(slots)
                with self._stopwatch.measure("replay"):
                    self._engine.run([len(hit.rows) for hit in hits], slots, inputs)
                replayed = self._lanes.replay.record("states replayed")
            self._lanes.current_waits(replayed)

    def _fetch(self, row: int, ids: np.ndarray) -> Fetched:
        with self._lanes.copy.after(), self._stopwatch.measure("fetch"):
            return self._mover.fetch([row], ids)[0]


class _Inputs:
    """h [T, d] of every group of every launch, fetched one group ahead of the replay."""

    def __init__(self, engine: ReplayEngine, hits: Sequence[Hit], embed, fetch, lanes: Lanes, device: torch.device):
        self._embed, self._fetch, self._lanes, self._device = embed, fetch, lanes, device
        launches = pack([len(hit.rows) for hit in hits], engine.max_tokens)
        self._rows = {launch: _gather(launch, [hit.rows for hit in hits]) for launch in launches}
        self._tokens = {launch: _gather(launch, [hit.token_ids for hit in hits]) for launch in launches}
        # What to fetch, in the order in which it is replayed.
        stored = [group.row for group, _ in engine.groups if group.row != EMBEDDING]
        self._plan = [(row, launch) for launch in launches for row in stored]
        self._fetched: dict[tuple[int, Launch], Fetched] = {}
        self._fetch_next()

    def __call__(self, group: Group, launch: Launch) -> torch.Tensor:
        if group.source == EMBEDDING:
            ids = torch.from_numpy(self._tokens[launch])
            if self._device.type == "cuda":
                ids = ids.pin_memory().to(self._device, non_blocking=True)
            return self._embed(ids)
        fetched = self._fetched.pop((group.row, launch))
        self._fetch_next()
        self._lanes.current_waits(fetched.ready)  # the current stream is the replay lane's
        return fetched.tensor

    def _fetch_next(self) -> None:
        if self._plan:
            row, launch = self._plan.pop(0)
            self._fetched[row, launch] = self._fetch(row, self._rows[launch])


def _gather(launch: Launch, per_hit: Sequence[np.ndarray]) -> np.ndarray:
    """The launch's pieces of per-token data, one after another: [launch.tokens]."""
    return np.concatenate([per_hit[piece.hit][piece.start : piece.end] for piece in launch.pieces])
