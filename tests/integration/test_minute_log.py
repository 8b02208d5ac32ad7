"""The line of a minute: said once it is over, about the requests since the last one, and never about none."""

import pytest

from sglang_tailreplay.minute_log import SECONDS, MinuteLog
from sglang_tailreplay.scheduling import Admission


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def log(clock, said):
    return MinuteLog(said.append, clock)


def test_a_minute_adds_up_and_is_said_once(log, clock, said):
    log.admitted(Admission(0, 0, None, prompt=100))
    log.admitted(Admission(80, 10, 90, prompt=120))
    clock.now += SECONDS - 1
    log.look(3, 12)
    assert said == []
    clock.now += 2
    log.look(3, 12)
    log.look(3, 12)
    assert said == [
        "tail_replay: in 61 s, #req: 2, #hit: 1, #shrunk-hit: 1, #prompt-token: 220, #cached-token: 80, "
        "#replayed-token: 10, row usage: 0.25"
    ]


def test_a_minute_begins_with_a_request(log, clock, said):
    clock.now += 10 * SECONDS
    log.look(0, 12)
    log.admitted(Admission(0, 0, None, prompt=5))
    log.look(0, 12)
    clock.now += SECONDS
    log.look(0, 0)  # no rows in mode zero
    assert len(said) == 1 and said[0].startswith("tail_replay: in 60 s, #req: 1, ") and "row usage" not in said[0]
    clock.now += 10 * SECONDS
    log.look(0, 12)
    assert len(said) == 1
