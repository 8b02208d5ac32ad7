"""Where a replay begins: by hand at the edges, and against every other choice that there was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay_rule import EXACT, SEEDED, ZERO, Begin, begin, begin_within, boundaries


def chosen(m, k, reach, anchors, rows_from=0):
    """Tokens [rows_from, m) have rows."""
    return begin(m, k, reach, sorted(anchors, reverse=True), lambda n: m - n >= rows_from)


@pytest.mark.parametrize(
    "m, k, reach, anchors, rows_from, expected",
    [
        (1000, 64, 256, [900], 0, Begin(EXACT, 100, 900)),
        (1000, 64, 256, [1000], 936, Begin(EXACT, 0, 1000)),  # a state right there needs no rows
        (1000, 64, 256, [300, 744], 0, Begin(EXACT, 256, 744)),
        (1000, 64, 256, [300, 743], 0, Begin(SEEDED, 64, 743)),  # one token out of reach
        (1000, 64, 256, [300, 800], 850, Begin(SEEDED, 64, 800)),  # rows behind it are gone
        (1000, 64, 256, [800, 860], 861, Begin(SEEDED, 64, 860)),
        (1000, 64, 256, [], 0, Begin(ZERO, 64, None)),
        (256, 64, 256, [], 0, Begin(EXACT, 256, None)),  # all of it is as good as a state
        (257, 64, 256, [], 0, Begin(ZERO, 64, None)),
        (256, 64, 256, [], 1, Begin(ZERO, 64, None)),
        (256, 64, 256, [10], 1, Begin(EXACT, 246, 10)),
        (1000, 1000, 1000, [700], 0, Begin(EXACT, 300, 700)),  # r = 1 takes the shorter way
        (50, 50, 50, [], 0, Begin(EXACT, 50, None)),
    ],
)
def test_edges(m, k, reach, anchors, rows_from, expected):
    assert chosen(m, k, reach, anchors, rows_from) == expected


@given(st.data())
def test_nothing_better_was_to_be_had(data):
    m = data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, m))
    reach = data.draw(st.integers(k, 400))
    rows_from = data.draw(st.integers(0, m - k))
    anchors = data.draw(st.sets(st.integers(1, m), max_size=6))
    kind, tail, c = chosen(m, k, reach, anchors, rows_from)
    exact = {m - a for a in anchors if m - a <= reach and a >= rows_from}
    if rows_from == 0 and (m <= reach or k == m):
        exact.add(m)
    assert m - tail >= rows_from or tail == 0, "a row is missing"
    if exact:
        assert (kind, tail) == (EXACT, min(exact))
        assert (c if c is not None else 0) == m - tail
    else:
        assert (kind, tail) == (SEEDED if anchors else ZERO, k)
        assert c == (max(anchors) if anchors else None)
        assert c is None or c < m - k, "the tail would be replayed on top of a part of itself"


# ---- within a bound ----


def within(m, k, most, reach, anchors, enough, rows_from=0):
    """Tails of `enough` tokens and more are within the bound."""

    def least_tail(low, high):
        assert k == low <= high <= most and m - high >= rows_from, "a tail without rows was asked for"
        return max(low, enough) if enough <= high else None

    return begin_within(m, k, most, reach, sorted(anchors, reverse=True), lambda n: m - n >= rows_from, least_tail)


@pytest.mark.parametrize(
    "most, anchors, enough, rows_from, expected",
    [
        (500, [], 64, 0, Begin(ZERO, 64, None)),  # the usual tail is enough
        (500, [], 300, 0, Begin(ZERO, 300, None)),
        (500, [200], 300, 0, Begin(SEEDED, 300, 200)),
        (500, [], 501, 0, None),
        (500, [200], 501, 0, None),
        (500, [], 300, 701, None),  # the rows that it takes are not there
        (500, [500], 501, 0, Begin(EXACT, 500, 500)),  # too far away for a usual hit
        (500, [500], 501, 501, None),
        (500, [650], 400, 0, Begin(EXACT, 350, 650)),  # in the longer tail lies a state
        (500, [550], 400, 0, Begin(SEEDED, 400, 550)),
        (500, [900], 400, 0, Begin(EXACT, 100, 900)),  # within reach, whatever the bound
        (1000, [], 1001, 0, Begin(EXACT, 1000, None)),  # all may be replayed, and is
        (1000, [], 1001, 1, None),
    ],
)
def test_edges_of_a_bound(most, anchors, enough, rows_from, expected):
    assert within(1000, 64, most, 128, anchors, enough, rows_from) == expected


@given(st.data())
def test_a_bound_is_kept_if_it_can_be(data):
    m = data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, m))
    most = data.draw(st.integers(k, m))
    reach = data.draw(st.integers(k, 400))
    rows_from = data.draw(st.integers(0, m - k))
    anchors = data.draw(st.sets(st.integers(1, m), max_size=6))
    enough = data.draw(st.integers(1, 320))
    found = within(m, k, most, reach, anchors, enough, rows_from)
    usual = chosen(m, k, reach, anchors, rows_from)
    if usual.kind == EXACT:
        assert found == usual
        return
    tail = max(k, enough)
    fits = tail <= most and m - tail >= rows_from
    far = [c for c in (*anchors, 0) if m - c <= most and c >= rows_from]  # from there it is exact
    if found is None:
        assert not fits and not far
    elif found.kind == EXACT:
        assert far and found.tail <= most
        assert m - found.tail == (found.anchor or 0) and m - found.tail in far
    else:
        assert fits and found.tail == tail
        assert found.anchor == max(anchors, default=None)
        assert found.anchor is None or found.anchor < m - tail


def test_boundaries_to_try():
    assert boundaries(1000, 300, [900, 400, 150], [960, 896]) == [960, 896, 700, 450, 300]
    assert boundaries(250, 300, [], [192]) == [192]
    assert boundaries(1000, None, [900], [960]) == [960]
