"""The grid: which cells are measured, and that a request can ask for each of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.calibrate.plan import Cell, cells, control, grid, ratio_for
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
