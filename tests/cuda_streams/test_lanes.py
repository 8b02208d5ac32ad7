import pytest
import torch

from sglang_tailreplay.cuda_streams.lanes import InlineLane, Lanes, keep
from sglang_tailreplay.cuda_streams.recording import LogEntry, RaceError, RecordingLanes


def test_without_cuda_everything_runs_in_order():
    lanes = Lanes.create("cpu")
    assert isinstance(lanes.copy, InlineLane) and isinstance(lanes.replay, InlineLane)
    x = torch.zeros(2)
    made = lanes.mark_current("made")
    with lanes.copy.after(made):
        lanes.copy.reads(x)
        x += 1
        copied = lanes.copy.record("copied")
    lanes.current_waits(copied)
    copied.synchronize()
    assert copied.query() and x.tolist() == [1, 1]
    keep(x, lanes.replay)


class Event:
    """A torch.cuda.Event on a device that is behind."""

    def __init__(self):
        self.stream = None

    def record(self, stream):
        self.stream = stream


def test_without_overlap_lanes_are_the_callers_stream_which_the_host_does_not_wait_for(monkeypatch):
    """Or the ring of pinned ids would be written over while uploads out of it are on their way."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    lanes = Lanes.create("cuda", overlap=False)
    assert isinstance(lanes.copy, InlineLane) and isinstance(lanes.replay, InlineLane)
    with lanes.copy.after(lanes.mark_current("made")):
        assert lanes.copy.record("uploaded").stream == "the caller's"


def test_the_log_is_the_order_of_the_calls():
    lanes = RecordingLanes()
    x = torch.zeros(3)
    lanes.forward.writes(x)
    with lanes.copy.after(lanes.mark_current("made")):
        lanes.copy.reads(x)
        done = lanes.copy.record("copied")
    lanes.current_waits(done)
    assert lanes.log == [
        LogEntry("forward", "writes", "(3,)"),
        LogEntry("forward", "record", "made"),
        LogEntry("copy", "wait", "made"),
        LogEntry("copy", "reads", "(3,)"),
        LogEntry("copy", "record", "copied"),
        LogEntry("forward", "wait", "copied"),
    ]


def test_current_is_the_lane_that_the_caller_has_entered():
    lanes = RecordingLanes()
    with lanes.replay.after():
        inside = lanes.mark_current("inside")
        with lanes.copy.after(inside):
            assert lanes.current is lanes.copy
        assert lanes.current is lanes.replay
    assert lanes.current is lanes.forward
    assert [entry.lane for entry in lanes.log] == ["replay", "copy"]


@pytest.mark.parametrize("first, second", [("writes", "reads"), ("reads", "writes"), ("writes", "writes")])
def test_conflicting_accesses_need_an_event(first, second):
    for waits in (True, False):
        lanes, x = RecordingLanes(), torch.zeros(3)
        getattr(lanes.copy, first)(x)
        event = lanes.copy.record("done")
        with lanes.replay.after(*[event] * waits):
            if waits:
                getattr(lanes.replay, second)(x)
            else:
                with pytest.raises(RaceError, match="replay .* copy"):
                    getattr(lanes.replay, second)(x)


def test_views_conflict_where_they_overlap():
    lanes, x = RecordingLanes(), torch.zeros(4, 3)
    lanes.copy.writes(x[0])
    event = lanes.copy.record("first row")
    lanes.copy.writes(x[1])
    with lanes.replay.after(event):
        lanes.replay.reads(x[0])
        lanes.replay.writes(x[2:])
        with pytest.raises(RaceError):
            lanes.replay.reads(x[:2])


def test_two_readers_need_none_and_views_share_a_storage():
    lanes, x = RecordingLanes(), torch.zeros(4, 3)
    lanes.copy.reads(x)
    lanes.replay.reads(x)
    with lanes.copy.after(lanes.replay.record("read")):
        lanes.copy.writes(x[1])
    with pytest.raises(RaceError):
        lanes.replay.reads(x[:2])


def test_an_event_covers_only_what_came_before_it():
    lanes, x = RecordingLanes(), torch.zeros(3)
    early = lanes.copy.record("early")
    lanes.copy.writes(x)
    with lanes.replay.after(early), pytest.raises(RaceError):
        lanes.replay.reads(x)


def test_order_is_transitive():
    lanes, x = RecordingLanes(), torch.zeros(3)
    lanes.copy.writes(x)
    with lanes.replay.after(lanes.copy.record("copied")):
        replayed = lanes.replay.record("replayed")
    lanes.current_waits(replayed)
    lanes.forward.reads(x)


def test_the_host_orders_what_it_submits_but_must_synchronize_to_write():
    lanes, staged = RecordingLanes(), torch.zeros(3)
    lanes.host.writes(staged)
    lanes.copy.reads(staged)  # submitted after the write: no event needed
    read = lanes.copy.record("read")
    assert not read.query()
    with pytest.raises(RaceError, match="host writes .* copy reads"):
        lanes.host.writes(staged)
    read.synchronize()
    assert read.query()
    lanes.host.writes(staged)
