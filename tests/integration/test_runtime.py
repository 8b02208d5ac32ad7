"""What the runtime does ahead of a pass, in which order."""

from types import SimpleNamespace

import pytest
import torch

from sglang_tailreplay import compat
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.runtime import Runtime


class Part:
    """Stands for one of the runtime's parts; writes down what is called."""

    def __init__(self, name, log):
        self._name, self._log = name, log

    def __getattr__(self, method):
        return lambda *args: self._log.append((f"{self._name}.{method}", *args))


def made(log, **settings):
    runtime = Runtime(TailReplayConfig(**settings), SimpleNamespace())
    runtime._model_runner = SimpleNamespace(device="cpu")
    runtime._replayer, runtime.capture, runtime.anchors = (
        Part(name, log) for name in ("replayer", "capture", "anchors")
    )
    return runtime


HITS = tuple(SimpleNamespace(rid=str(slot), slot=torch.tensor(slot)) for slot in (3, 5))


def test_a_slot_is_cleared_after_the_state_in_it_was_saved_and_before_it_is_replayed(monkeypatch):
    log = []
    monkeypatch.setattr(compat, "clear_states", lambda runner, slots: log.append(("cleared", slots)))
    assert made(log).replay_ahead(HITS)
    # Rows that wait for their way out are flushed before the replay fetches any.
    assert [name for name, *_ in log] == ["anchors.pass_begins", "cleared", "capture.flush", "replayer.run"]
    assert log[1][1].tolist() == [3, 5]
    assert log[3][1] is HITS and log[3][2] is log[1][1], "the slots' numbers were put together twice"


@pytest.mark.parametrize("without", ["overlap", "replayer"])
def test_without_overlap_or_rows_nothing_runs_ahead(without):
    log = []
    runtime = made(log, overlap=without != "overlap")
    if without == "replayer":
        runtime._replayer = None
    assert not runtime.replay_ahead(HITS)
    assert log == []
