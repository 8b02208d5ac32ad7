"""The grid: which cells are measured, and that a request can ask for each of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.calibrate.plan import Cell, boundaries, cells, control, grid, ratio_for
from sglang_tailreplay.config import CONV_WIDTH
from sglang_tailreplay.replay.tail import tail_length


@given(m=st.integers(CONV_WIDTH, 1 << 20), share=st.floats(0, 1))
def test_a_ratio_gives_exactly_its_tail(m, share):
    k = max(CONV_WIDTH, round(share * m))
    assert tail_length(m, ratio_for(k, m), CONV_WIDTH) == k


@pytest.mark.parametrize("tail", [0, 101])
def test_a_tail_outside_of_the_prefix_has_no_ratio(tail):
    with pytest.raises(ValueError):
        ratio_for(tail, 100)


def test_every_setting_is_covered_at_every_length_and_nothing_is_measured_twice():
    settings = grid((0.05, 1.0), (64, 256), (None, 128), (0, 2048))
    assert all(one.max_tokens is None or one.max_tokens >= one.min_tokens for one in settings)
    assert len(settings) == 2 * 3 * 2  # 256 with at most 128 is no setting
    lengths = (100, 4096)
    found = cells(settings, lengths)
    assert list(found) == [0, 2048]
    for interval, chosen in found.items():
        assert len(chosen) == len(set(chosen))
        assert {cell.anchor_interval for cell in chosen} == {interval}
        for one in settings:
            if one.anchor_interval == interval:
                assert {Cell(interval, length, one.tail(length)) for length in lengths} <= set(chosen)


def test_the_control_is_measured_without_anchors_whatever_was_asked_for():
    found = cells(grid((0.1,), (64,), (None,), (1024,)), (500,))
    assert found == {0: (control(500),), 1024: (Cell(1024, 500, 64),)}


def test_boundaries_lie_anywhere_behind_an_anchor():
    """Gaps to the last multiple of the interval are spread evenly, whatever the length is a multiple of."""
    for length in (4096, 8192, 9000):
        found = boundaries(length, (0, 2048), 16, 32, seed=0)
        assert all(length - 2048 < m <= length for m in found)
        gaps = sorted(m % 2048 for m in found)
        assert all(abs(gap - (i + 0.5) * 64) <= 64 for i, gap in enumerate(gaps))
        assert found != sorted(found) and found != sorted(found, reverse=True)
    assert boundaries(8192, (2048,), 16, 32, seed=0) == boundaries(8192, (0, 2048), 16, 32, seed=0)
    assert boundaries(8192, (2048,), 16, 32, seed=0) != boundaries(8192, (2048,), 16, 32, seed=1)


@pytest.mark.parametrize("intervals", [(0,), (2048,), (0, 1024)], ids=str)
def test_where_no_anchor_can_lie_all_boundaries_are_the_length(intervals):
    assert boundaries(1024, intervals, 16, 5, seed=0) == [1024] * 5


@given(st.integers(40, 5000), st.lists(st.integers(0, 5000), max_size=3), st.integers(1, 30), st.integers(1, 9))
def test_every_boundary_has_room_for_a_passage_and_for_every_tail(length, intervals, suffix, count):
    for m in boundaries(length, intervals, suffix, count, seed=0):
        assert m > suffix and 2 * m >= length
        for tail in (CONV_WIDTH, length // 20, length):
            k = Cell(0, length, max(tail, CONV_WIDTH)).tail_at(m)
            assert tail_length(m, ratio_for(k, m), CONV_WIDTH) == k
            assert k == max(-(-tail * m // length), CONV_WIDTH) or m == length


def test_all_of_a_length_is_all_of_each_boundary():
    assert control(1000).tail_at(777) == 777 and Cell(0, 1000, 50).tail_at(777) == 39
