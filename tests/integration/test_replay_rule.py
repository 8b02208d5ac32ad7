"""Where a replay begins: by hand at the edges, and against every other choice that there was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay_rule import EXACT, SEEDED, ZERO, Begin, begin


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
