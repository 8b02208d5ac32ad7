"""usable_boundary against trying every boundary."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_tailreplay.radix.boundary import usable_boundary
from sglang_tailreplay.replay.tail import tail_length

RATIOS = [0.01, 0.05, 0.3, 0.5, 0.999, 1.0]


def longest_whole(valid: np.ndarray, tail) -> int:
    """By definition: try every boundary."""
    return max(b for b in range(len(valid) + 1) if valid[b - tail(b) : b].all())


# Long runs, as a row store makes them: single bits would rarely hold a tail.
runs = st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=8).map(
    lambda pieces: np.array([bit for bit, n in pieces for _ in range(n)], dtype=bool)
)
bits = st.lists(st.booleans(), max_size=40).map(lambda values: np.array(values, dtype=bool))


@given(
    valid=runs | bits,
    ratio=st.sampled_from(RATIOS),
    least=st.integers(1, 70),
    spread=st.none() | st.integers(0, 50),
)
@example(valid=np.zeros(0, dtype=bool), ratio=1.0, least=4, spread=None)
@example(valid=np.ones(3, dtype=bool), ratio=0.05, least=64, spread=None)
def test_equals_brute_force(valid, ratio, least, spread):
    most = None if spread is None else least + spread

    def tail(m: int) -> int:
        return tail_length(m, ratio, least, most)

    assert usable_boundary(valid, tail) == longest_whole(valid, tail)


@pytest.mark.parametrize(
    ("pattern", "boundary"),
    [
        ("", 0),
        ("1", 1),
        ("0", 0),
        ("111", 3),  # shorter than min_tokens: all of it is the tail
        ("0111", 0),
        ("01111", 5),
        ("011110", 5),
        ("0111101110", 5),
        ("1100000111", 2),
        ("1011110111101", 11),
    ],
)
def test_patterns(pattern, boundary):
    valid = np.array([c == "1" for c in pattern], dtype=bool)
    assert usable_boundary(valid, lambda m: tail_length(m, 0.1, 4)) == boundary


def test_whole_replay_needs_every_row():
    valid = np.ones(100, dtype=bool)
    valid[37] = False
    assert usable_boundary(valid, lambda m: tail_length(m, 1.0, 4)) == 37
