"""What is told of heads' decay over cached tokens: never too small a share, and no larger one than need be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tailreplay.radix.decays import RUN, Decays
from sglang_tailreplay.radix.rows import NO_ROW

HEADS = 3


class Prefix:
    """Tokens of a prefix, each with a row and log-gates, cut into runs as passes would have cut them."""

    def __init__(self, seed: int, runs: list[int], unknown: frozenset[int] = frozenset()):
        random = np.random.default_rng(seed)
        self.n = sum(runs)
        # Multiples of 1/16: sums of 64 are exact in float16.
        self.g = -random.integers(0, 16, (self.n, HEADS)) / 16
        self.ids = random.permutation(self.n + 5)[: self.n]
        sums = np.full((self.n + 5, HEADS), np.nan, dtype=np.float16)
        self.decays = Decays(sums)
        self.decays.given_out(self.ids)
        self.begins, steps = [], np.zeros(self.n, dtype=np.int64)
        begin = 0
        for length in runs:
            part = slice(begin, begin + length)
            sums[self.ids[part]] = self.g[part].cumsum(0)
            steps[part] = np.arange(length)
            self.begins.append(begin)
            begin += length
        known = np.array([i not in unknown for i in range(self.n)])
        ids = np.where(known, self.ids, NO_ROW)
        self.decays.arrived(self.decays.written(ids, steps, self.decays.owners(ids)))

    def naive(self, k: int) -> float:
        return float(self.g[self.n - k :].sum(0).max()) if k else 0.0


prefixes = st.builds(
    Prefix,
    seed=st.integers(0, 1000),
    runs=st.lists(st.integers(1, RUN), min_size=1, max_size=40),
    unknown=st.frozensets(st.integers(0, 60), max_size=20),
)
whole = st.builds(Prefix, seed=st.integers(0, 1000), runs=st.lists(st.integers(1, RUN), min_size=1, max_size=40))


@given(prefixes, st.data())
def test_the_share_that_is_told_is_never_too_small(prefix, data):
    k = data.draw(st.integers(0, prefix.n))
    assert prefix.naive(k) <= prefix.decays.log_kept(prefix.ids, k) <= 0


@given(whole, st.data())
def test_where_all_is_known_it_is_the_share(prefix, data):
    k = data.draw(st.integers(0, prefix.n))
    # Of the run that the tail begins in, a difference of rounded sums is told.
    assert prefix.decays.log_kept(prefix.ids, k) == pytest.approx(prefix.naive(k), abs=RUN * 2.0**-9 + 1e-5)
    begin = data.draw(st.sampled_from(prefix.begins))
    exact = prefix.n - begin
    assert prefix.decays.log_kept(prefix.ids, exact) == pytest.approx(prefix.naive(exact), abs=1e-6)


@settings(max_examples=300)
@given(prefixes, st.data())
def test_the_least_tail_is_enough_and_no_shorter_one_tried_is(prefix, data):
    decays, ids = prefix.decays, prefix.ids
    most = data.draw(st.integers(0, prefix.n))
    k = data.draw(st.integers(0, most))
    limit = -data.draw(st.integers(0, 1200)) / 16
    found = decays.least_tail(ids, k, most, limit)
    tried = sorted({k, most, *(n for n in (prefix.n - b for b in prefix.begins) if k < n < most)})
    enough = [n for n in tried if decays.log_kept(ids, n) <= limit + 1e-5]
    if found is None:
        assert not [n for n in tried if decays.log_kept(ids, n) <= limit - 1e-5]
    else:
        assert k <= found <= most and prefix.naive(found) <= limit + 1e-5
        assert found <= min([n for n in tried if decays.log_kept(ids, n) <= limit - 1e-5], default=most)
        assert enough, "no tail was enough, but one was found"


def test_the_worst_head_of_all_counts_not_the_worst_of_each_run():
    """Two heads that forget in turns: each keeps a half."""
    prefix = Prefix(0, [2, 2])
    sums = np.zeros((9, HEADS), dtype=np.float16)
    sums[prefix.ids[1]], sums[prefix.ids[3]] = (-1, 0, -2), (0, -1, -2)
    prefix.decays._sums = sums
    assert prefix.decays.log_kept(prefix.ids, 4) == -1


def test_sums_on_their_way_count_as_nothing():
    prefix = Prefix(1, [10, 10])
    late = prefix.ids[10:]
    prefix.decays.given_out(late)
    assert prefix.decays.log_kept(prefix.ids, 20) == pytest.approx(float(prefix.g[:10].sum(0).max()))
    ticket = prefix.decays.written(late, np.arange(10), prefix.decays.owners(late))
    assert prefix.decays.log_kept(prefix.ids, 20) > prefix.naive(20)
    prefix.decays.arrived(ticket)
    assert prefix.decays.log_kept(prefix.ids, 20) == pytest.approx(prefix.naive(20))


def test_a_write_for_an_earlier_owner_tells_nothing():
    """A row went to another token between a pass and the write of what it computed."""
    prefix = Prefix(2, [4])
    row = prefix.ids[3:]
    then = prefix.decays.owners(row)
    prefix.decays.given_out(row)
    prefix.decays.arrived(prefix.decays.written(row, np.array([3]), then))
    assert not prefix.decays.known(row[0])
    prefix.decays.arrived(prefix.decays.written(row, np.array([0]), prefix.decays.owners(row)))
    assert prefix.decays.known(row[0])


def test_a_prefix_may_end_inside_a_run():
    prefix = Prefix(3, [64, 64])
    ids = prefix.ids[:100]
    expected = float(prefix.g[36:100].sum(0).max())
    assert prefix.decays.log_kept(ids, 64) == pytest.approx(expected, abs=0.2) and expected < -1
    assert prefix.decays.least_tail(ids, 1, 100, float(prefix.g[64:100].sum(0).max())) == 36


def test_begins_of_runs():
    prefix = Prefix(4, [5, 7, 3])
    assert prefix.decays.begins(prefix.ids, 9) == [12, 5]
    assert prefix.decays.begins(prefix.ids, 1) == [12]
    assert prefix.decays.begins(prefix.ids[8:], 9) == [4]  # the run before begins earlier


def test_tokens_whose_sums_are_on_their_way_are_passed_over_at_once():
    """One by one, the 16 runs that a match tries would all be single tokens of the last pass, and it would look at each
    of thousands of them for each."""
    prefix = Prefix(6, [5, 7, *[60] * 50])
    prefix.decays.given_out(prefix.ids[12:])
    assert prefix.decays.begins(prefix.ids, 9) == [12, 5]
    assert prefix.decays.begins(prefix.ids[8:], 9) == [4]
    holes = prefix.ids.copy()
    holes[[3, *range(8, 30)]] = NO_ROW
    assert prefix.decays.begins(holes, 9) == [8, 5]  # the sums of token 4 cover token 3
    assert prefix.decays.begins(prefix.ids[12:], 9) == []


def test_broken_sums_are_found():
    prefix = Prefix(5, [6])
    prefix.decays.check_invariants()
    prefix.decays._sums[prefix.ids[2], 1] = 0.5
    with pytest.raises(AssertionError, match="keeps more"):
        prefix.decays.check_invariants()
    prefix.decays._sums[prefix.ids[2], 1] = np.nan
    with pytest.raises(AssertionError, match="keeps more"):
        prefix.decays.check_invariants()
