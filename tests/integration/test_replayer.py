"""The replayer's order of lanes. A run on `RecordingLanes` without a RaceError stands for every interleaving.

Engine and mover are the real ones; the layers only say on which lane they read and write what.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.mover import RowMover
from sglang_tailreplay.cuda_streams.recording import LogEntry, RaceError, RecordingLanes
from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.graphs import GraphedEngine
from sglang_tailreplay.replay.groups import EMBEDDING, FULL_ATTENTION, LINEAR_ATTENTION, find_groups
from sglang_tailreplay.replay.tail import pack
from sglang_tailreplay.replayer import Replayer
from sglang_tailreplay.step import Hit

F, L = FULL_ATTENTION, LINEAR_ATTENTION
STARTS_WITH_GDN = (L, F, L, L, F, L, F, L, L)  # the first group starts from the embedding
STARTS_WITH_FA = (F, L, L, F, L, F, L)
ONE_GROUP = (F, L)
TWO_GROUPS = (F, L, F, L)
R, D, SLOTS = 40, 4, 9


class Watch:
    """A stopwatch that says on which lane it was started and stopped."""

    def __init__(self, lanes):
        self.lanes = lanes
        self.stages = []

    @contextmanager
    def measure(self, stage: str):
        begin = self._lane()
        yield
        assert self._lane() == begin, f"{stage} began on {begin} and ended on {self._lane()}"
        self.stages.append((stage, begin))

    def _lane(self) -> str:
        return getattr(self.lanes, "current", self.lanes.copy).name


class Serving:
    """A replayer around fake layers, and the order in which things were asked for."""

    def __init__(self, kinds=STARTS_WITH_GDN, max_tokens=100, lanes=None, graphs=False):
        self.lanes = lanes or RecordingLanes()
        self.order = []  # ("fetch", row, tokens), ("replay", layer, tokens), ("embed", token ids)
        self.inputs = {}  # first layer of a group -> what its launches read
        self.states = torch.zeros(SLOTS)
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.groups = find_groups(kinds)
        stored = sum(group.source != EMBEDDING for group in self.groups)
        self.rows = torch.arange(stored * R * D, dtype=torch.float32).reshape(stored, R, D)
        self.mover = RowMover(self.rows, self.lanes)
        fetch = self.mover.fetch

        def noted(groups, ids, *args, **kwargs):
            self.order.append(("fetch", groups[0], len(ids)))
            return fetch(groups, ids, *args, **kwargs)

        self.mover.fetch = noted
        layers = [(group, [Layer(self, i, i == group.layers[0]) for i in group.layers]) for group in self.groups]
        self.engine = GraphedEngine(layers, max_tokens, True, "cpu", D, torch.float32) if graphs else None
        self.engine = self.engine or ReplayEngine(layers, max_tokens)
        if graphs:
            # A graph reads its whole bucket from fixed memory, whatever the launch fills of it.
            self.engine.capture(lambda body: body)
        self.watch = Watch(self.lanes)
        self.replayer = Replayer(self.engine, self.embed, self.mover, self.lanes, self.watch)

    @property
    def current(self):
        return getattr(self.lanes, "current", self.lanes.copy)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        self.order.append(("embed", ids.tolist()))
        h = -ids.float()[:, None].expand(len(ids), D).contiguous()
        self.current.writes(h)
        return h

    def run(self, *tails: int):
        """One batch of hits; hit i's tail has tails[i] tokens in rows that lie across the store."""
        offsets = np.cumsum([0, *tails])
        shuffled = np.random.default_rng(0).permutation(R)
        hits = [
            Hit(f"r{i}", torch.tensor(i), shuffled[begin:end].astype(np.int64), np.arange(begin, end) + 500)
            for i, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False))
        ]
        self.slots = torch.arange(len(tails))
        if isinstance(self.lanes, RecordingLanes):
            self.lanes.forward.writes(self.slots, self.states)  # clears the slots
        self.replayer.run(hits, self.slots)
        assert self.replayer.pending
        self.replayer.wait()
        assert not self.replayer.pending
        return hits


class Layer:
    """A GDN layer that replays nothing."""

    def __init__(self, serving: Serving, index: int, first: bool):
        self.serving, self.index, self.first = serving, index, first

    def step(self, f, h, segments):
        self._use(h, segments)
        h += 1
        return None, h

    def state_only(self, f, h, segments):
        self._use(h, segments)

    def _use(self, h, segments):
        serving = self.serving
        tokens = int(segments.cu[-1])
        serving.order.append(("replay", self.index, tokens))
        serving.current.reads(segments.slots)
        serving.current.writes(h, serving.states)
        if self.first:
            serving.inputs.setdefault(self.index, []).append(h[:tokens].clone())


LAYOUTS = [STARTS_WITH_GDN, STARTS_WITH_FA, ONE_GROUP, TWO_GROUPS]
BATCHES = [((5,), 100), ((3, 7, 2), 100), ((3, 7, 2), 8), ((20, 1, 9), 8)]


@pytest.mark.parametrize("graphs", [False, True], ids=["kernels", "graphs"])
@pytest.mark.parametrize("kinds", LAYOUTS)
@pytest.mark.parametrize("tails, max_tokens", BATCHES)
def test_every_group_gets_the_rows_of_its_launch(kinds, tails, max_tokens, graphs):
    serving = Serving(kinds, max_tokens, graphs=graphs)
    hits = serving.run(*tails)
    launches = pack(tails, max_tokens)
    for group in serving.groups:
        found = serving.inputs[group.layers[0]]
        assert len(found) == len(launches)
        for h, launch in zip(found, launches, strict=True):
            pieces = [(hits[piece.hit], slice(piece.start, piece.end)) for piece in launch.pieces]
            if group.source == EMBEDDING:
                ids = np.concatenate([hit.token_ids[part] for hit, part in pieces])
                assert h[:, 0].tolist() == (-ids).tolist()
            else:
                ids = np.concatenate([hit.rows[part] for hit, part in pieces])
                assert torch.equal(h, serving.rows[group.row, ids])


@pytest.mark.parametrize("kinds", [STARTS_WITH_GDN, STARTS_WITH_FA])
@pytest.mark.parametrize("tails, max_tokens", [((5,), 100), ((20, 1, 9), 8)])
def test_the_next_group_is_fetched_before_a_group_is_replayed(kinds, tails, max_tokens):
    serving = Serving(kinds, max_tokens)
    serving.run(*tails)
    launches = pack(tails, max_tokens)
    stored = [group for group in serving.groups if group.source != EMBEDDING]
    plan = [(launch, group) for launch in launches for group in stored]

    fetches = [(at, *entry[1:]) for at, entry in enumerate(serving.order) if entry[0] == "fetch"]
    assert [entry[1:] for entry in fetches] == [(group.row, launch.tokens) for launch, group in plan]
    first_layers = [group.layers[0] for group in stored]
    replays = [at for at, entry in enumerate(serving.order) if entry[0] == "replay" and entry[1] in first_layers]
    assert len(replays) == len(fetches)
    for this, following in zip(replays, fetches[1:], strict=False):
        assert following[0] < this, "the next rows were asked for only after this group was replayed"
    for i, (at, *_) in enumerate(fetches[2:]):
        assert at > replays[i], "rows were asked for more than one group ahead"


def test_in_graphs_one_group_is_fetched_while_another_is_replayed():
    """No fetch waits for the replay of the group just before its own: their inputs lie in different buffers."""
    serving = Serving((L, F, L, F, L, F, L, F, L), graphs=True)  # five groups: the last is neighbour of the first
    for _ in range(2):
        serving.run(5)
        buffers = [serving.engine.buffer_of(number) for number in range(5)]
        assert all(a != b for a, b in zip(buffers, buffers[1:] + buffers[:1], strict=True))
    kinds = [entry[0] for entry in serving.order]
    assert kinds[:5] == ["fetch", "embed", "replay", "fetch", "replay"]


def test_launches_run_one_after_the_other_and_groups_in_order():
    serving = Serving(max_tokens=8)
    serving.run(20, 1, 9)
    layers = [layer for group in serving.groups for layer in group.layers]
    expected = [(layer, launch.tokens) for launch in pack((20, 1, 9), 8) for layer in layers]
    assert [entry[1:] for entry in serving.order if entry[0] == "replay"] == expected


def test_the_embedding_gets_the_tokens_of_the_tail():
    serving = Serving(max_tokens=4)
    serving.run(6, 2)
    assert [entry[1] for entry in serving.order if entry[0] == "embed"] == [
        [500, 501, 502, 503],
        [504, 505, 506, 507],  # the rest of the first tail, and the second
    ]


def test_rows_are_fetched_on_the_copy_lane_and_replayed_on_the_replay_lane():
    serving = Serving()
    serving.run(5)
    fetches = len([entry for entry in serving.order if entry[0] == "fetch"])
    assert serving.watch.stages == [("fetch", "copy")] * fetches + [("replay", "replay"), ("wait", "forward")]
    assert serving.lanes.current is serving.lanes.forward


def test_the_caller_waits_for_the_states_and_for_nothing_else():
    serving = Serving()
    serving.run(5)
    waits = [entry for entry in serving.lanes.log if entry.lane == "forward" and entry.op == "wait"]
    assert waits == [LogEntry("forward", "wait", "states replayed")]
    serving.lanes.forward.reads(serving.states)
    serving.lanes.forward.writes(serving.states, serving.slots)


def test_the_replay_waits_for_the_cleared_slots():
    serving = Serving()
    serving.run(5)
    log = serving.lanes.log
    replay = [entry for entry in log if entry.lane == "replay"]
    assert replay[0] == LogEntry("replay", "wait", "slots cleared")
    assert replay[-1] == LogEntry("replay", "record", "states replayed")
    rows_waited = [entry for entry in replay if entry == LogEntry("replay", "wait", "rows fetched")]
    assert len(rows_waited) == len(serving.rows)


def test_rows_of_the_pass_before_are_there():
    """The rows that a pass writes out, at once and unwaited, are what the next replay fetches."""
    serving = Serving()
    source = torch.full((R, D), 7.0)
    serving.lanes.forward.writes(source)
    serving.mover.write_out(1, source, np.arange(R))
    serving.run(5)
    group = next(group for group in serving.groups if group.row == 1)
    assert (serving.inputs[group.layers[0]][0] == 7).all()


class NotedGate:
    def __init__(self, number, serving):
        self.number, self.serving = number, serving

    def open(self, lane):
        assert lane is self.serving.lanes.replay
        self.serving.order.append(("open", self.number, 0))


def test_a_gate_opens_behind_the_last_replay_of_its_group():
    serving = Serving(max_tokens=8)
    serving.replayer.gates = [NotedGate(i, serving) for i in range(len(serving.groups))]
    serving.run(20, 1, 9)
    assert serving.replayer.gates
    for number, group in enumerate(serving.groups):
        opened = [at for at, entry in enumerate(serving.order) if entry == ("open", number, 0)]
        replays = [at for at, entry in enumerate(serving.order) if entry[0] == "replay" and entry[1] in group.layers]
        assert len(opened) == 1 and opened[0] > max(replays)
        later = [at for at, entry in enumerate(serving.order) if entry[0] == "replay" and at > opened[0]]
        assert all(serving.order[at][1] > max(group.layers) for at in later), "opened as soon as the states are there"


def test_who_waits_at_the_gates_does_not_wait_for_all_of_them():
    serving = Serving()
    serving.replayer.gates = [NotedGate(i, serving) for i in range(len(serving.groups))]
    waits = len([entry for entry in serving.lanes.log if entry.lane == "forward" and entry.op == "wait"])
    serving.replayer.wait = lambda wait=serving.replayer.wait: wait(behind_gates=True)
    serving.run(5)
    assert waits == len([entry for entry in serving.lanes.log if entry.lane == "forward" and entry.op == "wait"])


@pytest.mark.parametrize("graphs", [False, True], ids=["kernels", "graphs"])
@pytest.mark.parametrize("kinds", LAYOUTS)
def test_batches_follow_each_other(kinds, graphs):
    serving = Serving(kinds, max_tokens=8, graphs=graphs)
    for tails in ((3,), (20, 1, 9), (8, 8)):
        serving.run(*tails)
    serving.lanes.forward.reads(serving.states)


@pytest.mark.parametrize("forgotten", ["states replayed", "slots cleared", "rows fetched", "input replayed"])
def test_a_forgotten_wait_is_a_race(forgotten, monkeypatch):
    """That the tests above would notice."""
    serving = Serving(graphs=forgotten == "input replayed")
    join = serving.lanes.join
    monkeypatch.setattr(
        serving.lanes, "join", lambda lane, event: None if event.name == forgotten else join(lane, event)
    )
    with pytest.raises(RaceError):
        serving.run(5)
        serving.lanes.forward.reads(serving.states)
        serving.run(5)


def test_without_overlap_the_same_rows_arrive():
    inline, overlapped = Serving(lanes=Lanes.create("cpu"), max_tokens=8), Serving(max_tokens=8)
    for serving in (inline, overlapped):
        serving.run(20, 1, 9)
    assert inline.order == overlapped.order
    for layer, found in overlapped.inputs.items():
        assert all(torch.equal(a, b) for a, b in zip(found, inline.inputs[layer], strict=True))


def test_poison_reaches_nothing_that_is_replayed():
    serving = Serving(graphs=True)
    serving.replayer.poison = True
    for _ in range(2):
        serving.run(5, 3)
    assert all(torch.isfinite(h).all() for found in serving.inputs.values() for h in found)
    assert serving.engine.input_buffer(0, pack((5, 3), 100)[0]).isnan().all()
