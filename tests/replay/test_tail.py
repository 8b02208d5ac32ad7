from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay.tail import Launch, Piece, pack, tail_length


@pytest.mark.parametrize(
    "m, ratio, low, high, k",
    [
        (1000, 0.05, 1, None, 50),
        (1001, 0.05, 1, None, 51),
        (100, 0.07, 1, None, 7),  # 0.07 * 100 is 7.000000000000001 in floats
        (300, 1 / 3, 1, None, 100),
        (1000, 0.05, 64, None, 64),
        (40, 0.05, 64, None, 40),
        (3, 0.05, 64, None, 3),
        (0, 0.05, 64, None, 0),
        (100_000, 0.05, 64, 2048, 2048),
        (100_000, 0.05, 64, 32, 32),
        (1234, 1, 64, None, 1234),
        (1234, 1.0, 64, None, 1234),
        (10**12, "0.1", 1, None, 10**11),
        (10**6, 1e-05, 1, None, 10),
    ],
)
def test_tail_length(m, ratio, low, high, k):
    assert tail_length(m, ratio, low, high) == k


@given(m=st.integers(0, 10**7), thousandths=st.integers(1, 1000), low=st.integers(1, 200))
def test_tail_length_is_the_exact_ceiling(m, thousandths, low):
    exact = -(-m * thousandths // 1000)
    for ratio in (thousandths / 1000, Fraction(thousandths, 1000), str(thousandths / 1000)):
        assert tail_length(m, ratio, low) == min(m, max(low, exact))


@pytest.mark.parametrize(
    "arguments",
    [(10, 0, 1), (10, 1.01, 1), (10, -0.1, 1), (-1, 0.5, 1), (10, 0.5, 0), (10, 0.5, 1, 0), (10, float("nan"), 1)],
)
def test_tail_length_refuses(arguments):
    with pytest.raises(ValueError):
        tail_length(*arguments)


def test_pack_cuts_only_what_is_too_long():
    assert pack([40, 40, 24, 150, 10], max_tokens=64) == (
        Launch((Piece(0, 0, 40, False),)),
        Launch((Piece(1, 0, 40, False), Piece(2, 0, 24, False))),
        Launch((Piece(3, 0, 64, False),)),
        Launch((Piece(3, 64, 128, True),)),
        Launch((Piece(3, 128, 150, True), Piece(4, 0, 10, False))),
    )


@pytest.mark.parametrize("tails, budget", [([0], 64), ([5, -1], 64), ([5], 0)])
def test_pack_refuses(tails, budget):
    with pytest.raises(ValueError):
        pack(tails, budget)


def test_pack_nothing():
    assert pack([], 64) == ()


@given(tails=st.lists(st.integers(1, 300), max_size=12), budget=st.integers(1, 200))
def test_pack_covers_every_token_once_and_in_order(tails, budget):
    launches = pack(tails, budget)
    reached = [0] * len(tails)
    for launch in launches:
        assert 0 < launch.tokens <= budget
        hits = [piece.hit for piece in launch.pieces]
        assert hits == list(range(hits[0], hits[-1] + 1)), "consecutive hits, each once"
        for piece in launch.pieces:
            assert piece.start == reached[piece.hit] < piece.end
            assert piece.continues == (piece.start > 0)
            reached[piece.hit] = piece.end
    assert reached == tails


@given(tail=st.integers(1, 500), others=st.lists(st.integers(1, 500), max_size=5), budget=st.integers(1, 200))
def test_cuts_do_not_depend_on_other_hits(tail, others, budget):
    def cuts(launches, hit):
        return [piece[1:] for launch in launches for piece in launch.pieces if piece.hit == hit]

    assert cuts(pack([*others, tail], budget), len(others)) == cuts(pack([tail], budget), 0)
