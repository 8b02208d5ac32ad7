"""Running the grid: a server that fails costs its own cells only, and every prompt is asked in every cell."""

import contextlib
import threading
import time

import pytest

from sglang_tailreplay.calibrate import runner as running
from sglang_tailreplay.calibrate.judge import Sample
from sglang_tailreplay.calibrate.measure import NotServed
from sglang_tailreplay.calibrate.plan import Cell
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.errors import TailReplayError

CELLS = {0: (Cell(0, 8, 8), Cell(0, 8, 4)), 512: (Cell(512, 8, 4),)}


class Client:
    """Serves every request but those for cells in `refused`."""

    refused: frozenset = frozenset()
    room = 1000

    def __init__(self, url):
        pass

    def get(self, path):
        return {"max_total_num_tokens": self.room}

    def cold(self, ids, boundary, space, vocab_size):
        if "cold" in self.refused:
            raise NotServed("no")
        return ids

    def hit(self, cold, cell, space):
        if cell in self.refused:
            raise NotServed("no")
        return Sample((True,), (0.0,), cell.tail, True)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(refused cells, intervals whose server does not start): what was found."""

    def go(refused=(), failing=(), prompts=3, room=1000):
        @contextlib.contextmanager
        def server(model, config, flags, log, seconds):
            if config.anchor_interval in failing:
                raise TailReplayError("did not start")
            yield "url"

        monkeypatch.setattr(running, "server", server)
        monkeypatch.setattr(running, "Client", type("Fake", (Client,), {"refused": frozenset(refused), "room": room}))
        asked = {8: [[1] * 12] * prompts}
        return running.run(running.Task("M", TailReplayConfig(), [], asked, 4, CELLS, 100, 2, 1.0, tmp_path))

    return go


def test_every_prompt_is_asked_in_every_cell(run):
    found = run()
    assert found.errors == []
    assert {cell: len(samples) for cell, samples in found.samples.items()} == dict.fromkeys((*CELLS[0], *CELLS[512]), 3)


def test_a_server_that_does_not_start_costs_its_own_cells(run):
    found = run(failing=(512,))
    assert set(found.samples) == set(CELLS[0]) and "did not start" in found.errors[0]
    with pytest.raises(TailReplayError, match="nothing was measured"):
        run(failing=(0, 512))


def test_a_cell_that_is_not_served_costs_that_cell(run):
    found = run(refused=(Cell(0, 8, 4),))
    assert set(found.samples) == {Cell(0, 8, 8), Cell(512, 8, 4)} and len(found.errors) == 3


def test_a_server_that_only_fails_is_given_up(run):
    with pytest.raises(TailReplayError, match=f"{running.PATIENCE} prompts failed in a row"):
        run(refused=("cold",), prompts=50)


def test_an_end_does_not_wait_for_answers(run, monkeypatch):
    """Ctrl-C, or a SIGTERM: the server must be ended now, not when it has answered."""
    answered = threading.Event()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_ask", lambda *_: answered.wait(60))
    monkeypatch.setattr(running, "_collect", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - begin < 30
    answered.set()


def test_prompts_that_do_not_fit_are_refused_before_they_are_sent(run):
    with pytest.raises(TailReplayError, match="--lengths"):
        run(room=12)
