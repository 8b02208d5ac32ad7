"""Hits within a bound of what a replay leaves out: on a path of tokens whose decay is known."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tailreplay.radix.decays import Decays
from sglang_tailreplay.radix.rows import NO_ROW
from sglang_tailreplay.replay.tail import tail_length
from sglang_tailreplay.replay_rule import EXACT, SEEDED, ZERO, Begin
from sglang_tailreplay.residual import Prefix, ResidualBound


class Path:
    """TailReplayComponent's side, with one path whose tokens decay by g [n]; passes of 256 tokens computed them."""

    def __init__(self, g: np.ndarray, missing=()):
        n = len(g)
        self.g = np.stack([g, 2 * g], axis=1)
        ids = np.arange(n)
        sums = np.full((n, 2), np.nan, dtype=np.float16)
        for begin in range(0, n, 64):
            sums[begin : begin + 64] = self.g[begin : begin + 64].cumsum(0)
        self.decays = Decays(sums)
        self.decays.given_out(ids)
        self.decays.arrived(self.decays.written(ids, ids % 64, self.decays.owners(ids)))
        self.rows = ids.copy()
        self.rows[list(missing)] = NO_ROW

    def tail(self, node: int, k: int):
        """node is where it ends."""
        assert 0 <= k <= node <= len(self.rows)
        return SimpleNamespace(rows=self.rows[node - k : node])

    def kept(self, m: int, tail: int) -> float:
        return math.exp(self.g[m - tail : m].sum(0).max())


def usual(m: int) -> int:
    return tail_length(m, 0.05, 64)


def bound(path: Path, largest: float, most=None, reach=0) -> ResidualBound:
    return ResidualBound(path.decays, largest, most, reach)


HALF_LIFE_100 = np.full(1000, -math.log(2) / 100)


@pytest.mark.parametrize(
    "largest, most, tail",
    [
        (1, None, 64),
        (0.7, None, 64),
        (0.6, None, 1000 - 896),  # 64 tokens keep 64 %; the next begin of a run does
        (0.1, None, 1000 - 640),
        (0.1, 340, 340),  # where the longest tail is enough, but no begin of a run before it
    ],
)
def test_a_tail_grows_until_little_enough_is_left_out(largest, most, tail):
    path = Path(HALF_LIFE_100)
    limited = bound(path, largest, most)
    assert limited.begin(Prefix(path, 1000, 1000, 1000), 64, []) == Begin(ZERO, tail, None)
    seeded = bound(path, largest, most).begin(Prefix(path, 1000, 1000, 1000), 64, [3])
    assert seeded == Begin(SEEDED, tail, 3)
    assert limited.boundary(path, 1000, 1000, 1000, usual, []) == 1000
    assert limited.residual(Prefix(path, 1000, 1000, 1000), ZERO, tail) == pytest.approx(
        path.kept(1000, tail), rel=0.02
    )
    assert path.kept(1000, tail) <= largest


def test_an_exact_replay_leaves_nothing_out():
    path = Path(np.zeros(300))
    assert bound(path, 0.1).residual(Prefix(path, 300, 300, 300), EXACT, 0) == 0
    assert bound(path, 0.1).begin(Prefix(path, 300, 300, 300), 64, []) == Begin(EXACT, 300, None)


def test_a_hit_that_cannot_be_within_the_bound_shrinks_to_where_it_can():
    """Nothing decays in the last 200 tokens."""
    path = Path(np.concatenate((np.full(800, -0.05), np.zeros(200))))
    limited = bound(path, 0.01, most=100)
    assert limited.begin(Prefix(path, 1000, 1000, 1000), 64, []) is None
    # Of the last 100 tokens before 832, an end of a run, only 68 decay; of those before 768 all.
    assert limited.boundary(path, 1000, 1000, 1000, usual, []) == 768
    # 93 tokens are needed for 1 %; from the boundary 800 the last 100 are, and it is no end of a run.
    assert limited.boundary(path, 1000, 1000, 800, usual, []) == 800


def test_it_shrinks_to_where_a_state_is_within_reach():
    path = Path(np.zeros(1000))  # nothing ever decays
    assert bound(path, 0.9, most=100, reach=100).boundary(path, 1000, 1000, 1000, usual, [700, 250]) == 800
    assert bound(path, 0.9, most=100).boundary(path, 1000, 1000, 1000, usual, []) == 100
    assert bound(path, 0.9).boundary(path, 1000, 1000, 1000, usual, []) == 1000, "all of it is replayed"


def test_a_hit_that_cannot_be_served_at_all_is_refused():
    path = Path(np.zeros(1000), missing=[0])
    assert bound(path, 0.9, most=100).boundary(path, 1000, 1000, 1000, usual, []) == 0
    assert bound(path, 0.9).boundary(path, 1000, 1000, 1000, usual, []) == 0
    assert bound(path, 0.9).boundary(path, 1000, 1000, 1000, usual, [30]) == 1000


def test_ends_that_can_do_no_better_are_not_tried(monkeypatch):
    """Where the tail is bounded by a token without a row, all that lies behind that was not enough."""
    path, read = Path(np.zeros(1000), missing=[850]), []
    least_tail = path.decays.least_tail
    monkeypatch.setattr(path.decays, "least_tail", lambda ids, *rest: read.append(len(ids)) or least_tail(ids, *rest))
    assert bound(path, 0.9).boundary(path, 1000, 1000, 1000, usual, []) == 832, "all before it is replayed"
    assert len(read) == 2, "at the end of the match and before the hole, not at 960 and 896"


def test_a_hit_is_planned_as_its_match_was_decided():
    """Sums that arrive in between are not to make it impossible."""
    path = Path(HALF_LIFE_100)
    limited = bound(path, 0.6, most=200)
    match = Prefix(path, 1000, 1000, 1000)
    decided = limited.begin(match, 64, [800])
    assert decided == Begin(SEEDED, 104, 800)
    path.decays._sums[:] = 0
    assert limited.begin(Prefix(path, 1000, 1000, 1000), 64, [800]) == decided
    assert limited.residual(match, SEEDED, 104) == 0.6, "it was decided that no more is left out"
    assert limited.begin(match, 64, []) is None, "the state that it begins at is gone"
    path.rows[950] = NO_ROW
    assert limited.begin(Prefix(path, 1000, 1000, 1000), 20, [800]) is None
    assert limited.begin(Prefix(path, 1000, 1000, 1000), 64, [800]) is None, "a row is gone"
    path.rows[950] = 950
    limited.pass_begins()
    assert limited.begin(match, 64, [800]) == Begin(EXACT, 200, 800), "decided anew"


@settings(max_examples=200)
@given(st.data())
def test_where_it_ends_the_bound_holds(data):
    n = data.draw(st.integers(64, 600))
    seed, slow = data.draw(st.integers(0, 99)), data.draw(st.floats(0, 1))
    random = np.random.default_rng(seed)
    g = -random.integers(0, 3, n) / 64 * (random.random(n) > slow)
    missing = data.draw(st.sets(st.integers(0, n - 1), max_size=2))
    path = Path(g, missing)
    largest = data.draw(st.sampled_from([0.9, 0.5, 0.1, 0.01]))
    most = data.draw(st.sampled_from([None, 64, 200]))
    interval = data.draw(st.sampled_from([0, 50]))
    anchors = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)), reverse=True) if interval else []
    limited = bound(path, largest, most, 2 * interval)
    m = data.draw(st.integers(1, n).filter(lambda b: (path.rows[b - usual(b) : b] != NO_ROW).all()))
    b = limited.boundary(path, n, n, m, usual, anchors)
    assert 0 <= b <= m
    if limited.begin(Prefix(path, n, n, m), usual(m), [c for c in anchors if c <= m]) is not None:
        assert b == m
    if b == 0:
        return
    begun = limited.begin(Prefix(path, n, n, b), usual(b), [c for c in anchors if c <= b])
    assert (path.rows[b - begun.tail : b] != NO_ROW).all()
    if begun.kind == EXACT:
        assert b - begun.tail == (begun.anchor or 0)
    else:
        assert path.kept(b, begun.tail) <= largest + 1e-6
        assert limited.residual(Prefix(path, n, n, b), begun.kind, begun.tail) <= largest + 1e-6
