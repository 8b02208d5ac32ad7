"""The mover's order. A run on `RecordingLanes` without a RaceError stands for every interleaving of the lanes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.mover import IdRing, RowMover
from sglang_tailreplay.cuda_streams.recording import RaceError, RecordingLanes

G, R, H = 3, 12, 4

ROW_IDS = st.lists(st.integers(-1, R - 1), max_size=6, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([None, 0, 1, 2]), ROW_IDS),
        st.tuples(st.just("fetch"), st.lists(st.integers(0, G - 1), min_size=1, max_size=3), st.booleans()),
        st.tuples(st.just("replay"), st.just(None), st.just(None)),
        st.tuples(st.just("host reads"), st.just(None), st.just(None)),
    ),
    max_size=40,
)


class Serving:
    """Forward pass, replay and host around a mover, with the rows that a sequential machine would have."""

    def __init__(self):
        self.lanes = RecordingLanes()
        self.mover = RowMover(torch.zeros(G, R, H), self.lanes)
        self.expected = torch.zeros(G, R, H)
        self.pending = []  # (Fetched, rows that it must hold)
        self.buffer = torch.zeros(G, 5, H)  # a static input, as a captured graph has it
        self.buffer_free = []
        self.written = None
        self.count = 0

    def write(self, group, ids):
        shape = (len(ids), H) if group is not None else (G, len(ids), H)
        self.count += 1
        source = torch.full(shape, float(self.count))
        self.lanes.forward.writes(source)
        self.written = self.mover.write_out(group, source, np.array(ids, dtype=np.int64))
        kept = [i for i in ids if i >= 0]
        self.expected[slice(None) if group is None else group, kept] = self.count

    def fetch(self, groups, static):
        ids = [(7 * self.count + i) % R for i in range(5)]
        expected = [self.expected[group, ids].clone() for group in groups]
        if static:
            self.replay()
            fetched = self.mover.fetch(groups, ids, out=self.buffer[: len(groups)], after=self.buffer_free)
        else:
            fetched = self.mover.fetch(groups, ids)
        self.pending += zip(fetched, expected, strict=True)

    def replay(self, *_):
        for fetched, expected in self.pending:
            with self.lanes.replay.after(fetched.ready):
                self.lanes.replay.reads(fetched.tensor)
                assert torch.equal(fetched.tensor, expected)
        self.pending = []
        self.buffer_free = [self.lanes.replay.record("buffer free")]

    def host_reads(self, *_):
        if self.written is not None:
            self.written.synchronize()
            self.lanes.host.reads(self.mover.rows)
            assert torch.equal(self.mover.rows, self.expected)

    def run(self, steps):
        for step, first, second in steps:
            getattr(self, step.replace(" ", "_"))(first, second)
        self.replay()


@settings(deadline=None)
@given(STEPS)
def test_a_fetch_sees_every_earlier_write_out(steps):
    Serving().run(steps)


def test_groups_arrive_one_by_one():
    lanes = RecordingLanes()
    mover = RowMover(torch.randn(G, R, H), lanes)
    first, second = mover.fetch([2, 0], [5, 1])
    with lanes.replay.after(first.ready):
        lanes.replay.reads(first.tensor)
        with pytest.raises(RaceError):
            lanes.replay.reads(second.tensor)
    assert torch.equal(first.tensor, mover.rows[2, [5, 1]]) and torch.equal(second.tensor, mover.rows[0, [5, 1]])


def test_a_source_changed_after_the_hand_over_is_a_race():
    serving = Serving()
    source = torch.zeros(2, H)
    serving.lanes.forward.writes(source)
    serving.mover.write_out(0, source, [0, 1])
    with pytest.raises(RaceError, match="forward writes"):
        serving.lanes.forward.writes(source)


def test_a_mover_that_does_not_wait_is_caught(monkeypatch):
    serving = Serving()
    before = serving.lanes.mark_current("too early")
    monkeypatch.setattr(serving.lanes, "mark_current", lambda name: before)
    with pytest.raises(RaceError, match="copy reads"):
        serving.write(0, [1, 2])


def test_a_static_buffer_that_is_still_read_is_caught():
    serving = Serving()
    serving.fetch([0], static=True)
    serving.replay()
    with pytest.raises(RaceError, match="copy writes"):
        serving.mover.fetch([0], range(5), out=serving.buffer[:1])


@pytest.mark.parametrize("uploads", [2, 3, 7])
def test_id_buffers_are_reused_only_when_they_are_read(uploads, monkeypatch):
    lanes = RecordingLanes()
    ring = IdRing(lanes, torch.device("cpu"), buffers=2)
    for i in range(uploads):
        assert ring.upload(torch.arange(i + 1)).tolist() == list(range(i + 1))
    waited = [entry for entry in lanes.log if entry.lane == "host" and entry.op == "wait"]
    assert len(waited) == uploads - 2

    monkeypatch.setattr(ring, "_uploaded", [None, None])
    with pytest.raises(RaceError, match="host writes"):
        ring.upload(torch.arange(3))


def test_long_id_lists_grow_the_buffer():
    ring = IdRing(Lanes.create("cpu"), torch.device("cpu"), buffers=1)
    for size in (3000, 5, 5000, 0):
        assert torch.equal(ring.upload(torch.arange(size)), torch.arange(size))


@pytest.mark.parametrize("ids", [[0, R], [-1, 0], [[0, 1]]])
def test_fetch_refuses_ids(ids):
    with pytest.raises(ValueError, match="ids"):
        Serving().mover.fetch([0], ids)


def test_misuse_is_named():
    mover = Serving().mover
    with pytest.raises(ValueError, match=f"pool of {R} rows"):
        mover.write_out(0, torch.zeros(1, H), [R])
    with pytest.raises(ValueError, match="out must be"):
        mover.fetch([0, 1], [3], out=torch.zeros(1, 1, H))
    with pytest.raises(ValueError, match="16 bytes"):
        RowMover(torch.zeros(1, 2, 3), Lanes.create("cpu"))
    with pytest.raises(ValueError, match="pinned"):
        RowMover(torch.zeros(1, 2, 4), Lanes.create("cpu"), device="cuda")
