"""Who owns which row: the pool, the rows of a running request, the rows of a node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.radix.rows import NO_ROW, RequestRows, RowPool, RowSpan, no_rows


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def request(start: int, *values: int) -> RequestRows:
    rows = RequestRows(start)
    rows.append(ids(*values))
    return rows


# ---- RowPool ----


def test_fresh_pool_hands_out_rows_in_order():
    pool = RowPool(5)
    assert pool.alloc(2).tolist() == [0, 1]
    assert pool.alloc(2).tolist() == [2, 3]
    assert (pool.free_rows, pool.used_rows) == (1, 4)


def test_alloc_gives_what_is_there():
    pool = RowPool(3)
    assert pool.alloc(5).tolist() == [0, 1, 2]
    assert pool.alloc(1).tolist() == []
    assert pool.alloc(0).tolist() == []


@pytest.mark.parametrize("capacity", [0, 1])
def test_smallest_pools(capacity):
    pool = RowPool(capacity)
    taken = pool.alloc(2)
    assert len(taken) == capacity
    pool.free(taken)
    pool.check_invariants([])


def test_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 rows"):
        RowPool(-1)


def test_free_passes_over_missing_rows():
    pool = RowPool(4)
    taken = pool.alloc(2)
    pool.free(np.concatenate((no_rows(3), taken, no_rows(1))))
    assert pool.free_rows == 4
    pool.free(no_rows(7))
    assert pool.free_rows == 4
    pool.check_invariants([])


def test_allocated_ids_are_the_callers_own():
    pool = RowPool(2)
    pool.alloc(2)[:] = 77  # a view into the free list would be overwritten
    pool.free(ids(0, 1))
    assert sorted(pool.alloc(2).tolist()) == [0, 1]


def test_freeing_more_than_exists_is_noticed():
    pool = RowPool(2)
    with pytest.raises(AssertionError, match="more rows freed than exist"):
        pool.free(ids(0))


def test_version_rises_with_every_change():
    pool = RowPool(4)
    versions = [pool.version]
    taken = pool.alloc(1)
    versions.append(pool.version)
    pool.free(taken)
    versions.append(pool.version)
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([ids(0)], "without owner: [1]"),
        ([ids(0, 1), ids(1)], "several: [1]"),
        ([ids(0, 1, 2)], "several: [2]"),
        ([ids(0, 1, 9)], "row 9 does not exist"),
    ],
)
def test_recount_names_the_row(owned, message):
    pool = RowPool(4)
    pool.alloc(2)
    with pytest.raises(AssertionError) as error:
        pool.check_invariants(owned)
    assert message in str(error.value)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_every_row_has_one_owner_after_any_mix(moves):
    pool, held = RowPool(10), []
    for take, n in moves:
        if take:
            room = pool.free_rows
            held.append(pool.alloc(n))
            assert len(held[-1]) == min(n, room)
        elif held:
            pool.free(held.pop(n % len(held)))
        pool.check_invariants(held)
        assert pool.used_rows == sum(map(len, held))


# ---- RowSpan ----


@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_split_gives_every_row_to_one_side(n):
    span = RowSpan(ids(5, NO_ROW, 7, 8), generation=2)
    head = span.split(n)
    assert head.ids.tolist() == [5, NO_ROW, 7, 8][:n]
    assert span.ids.tolist() == [5, NO_ROW, 7, 8][n:]
    assert (head.generation, span.generation) == (2, 2)


def test_split_sides_share_no_memory():
    whole = ids(5, 6, 7)
    span = RowSpan(whole, generation=0)
    head = span.split(1)
    head.ids[:] = NO_ROW
    span.ids[:] = NO_ROW
    assert whole.tolist() == [5, 6, 7]


# ---- RequestRows ----


def test_new_request_has_no_rows():
    rows = RequestRows(7)
    assert (rows.start, rows.end, len(rows.ids)) == (7, 7, 0)
    assert len(rows.release()) == 0


def test_append_continues_at_the_end():
    rows = request(4, 10, NO_ROW)
    rows.append_one(12)
    rows.append(no_rows(0))
    assert (rows.start, rows.end, rows.ids.tolist()) == (4, 7, [10, NO_ROW, 12])


@pytest.mark.parametrize("n", [63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_growth_keeps_every_row(n, one_by_one):
    rows = request(3, 999)
    if one_by_one:
        for row in range(n):
            rows.append_one(row)
    else:
        rows.append(np.arange(n))
    assert rows.ids.tolist() == [999, *range(n)]
    assert rows.end == 4 + n


@pytest.mark.parametrize(
    ("begin", "end", "moved", "left"),
    [
        (4, 7, [10, 11, 12], [NO_ROW, NO_ROW, NO_ROW]),  # all
        (5, 6, [11], [10, NO_ROW, 12]),  # inside
        (2, 5, [NO_ROW, NO_ROW, 10], [NO_ROW, 11, 12]),  # over the start
        (6, 9, [12, NO_ROW, NO_ROW], [10, 11, NO_ROW]),  # over the end
        (3, 8, [NO_ROW, 10, 11, 12, NO_ROW], [NO_ROW, NO_ROW, NO_ROW]),  # over both
        (0, 4, [NO_ROW] * 4, [10, 11, 12]),  # before, touching
        (7, 9, [NO_ROW] * 2, [10, 11, 12]),  # after, touching
        (5, 5, [], [10, 11, 12]),  # nothing
    ],
)
def test_move_hands_over_the_overlap(begin, end, moved, left):
    rows = request(4, 10, 11, 12)
    assert rows.move(begin, end).tolist() == moved
    assert (rows.start, rows.end, rows.ids.tolist()) == (4, 7, left)


def test_moved_rows_are_moved_once():
    rows = request(0, 10, 11)
    rows.move(0, 2)
    assert rows.move(0, 2).tolist() == [NO_ROW, NO_ROW]
    assert rows.release().tolist() == [NO_ROW, NO_ROW]


@pytest.mark.parametrize(
    ("position", "released", "start"),
    [(0, [], 4), (4, [], 4), (5, [10], 5), (7, [10, 11, 12], 7), (9, [10, 11, 12], 7)],
)
def test_release_until_drops_the_head(position, released, start):
    rows = request(4, 10, 11, 12)
    assert rows.release_until(position).tolist() == released
    assert (rows.start, rows.end) == (start, 7)
    assert rows.ids.tolist() == [10, 11, 12][start - 4 :]


def test_released_rows_do_not_come_back():
    rows = request(0, 10, 11, 12)
    rows.release_until(2)
    rows.append(ids(13, 14))
    assert rows.ids.tolist() == [12, 13, 14]
    assert rows.move(0, 5).tolist() == [NO_ROW, NO_ROW, 12, 13, 14]


def test_release_then_restart_elsewhere():
    rows = request(4, 10, 11)
    assert rows.release().tolist() == [10, 11]
    assert (rows.start, rows.end) == (6, 6)
    rows.restart(2)
    rows.append_one(15)
    assert (rows.start, rows.end, rows.ids.tolist()) == (2, 3, [15])


@given(st.data())
def test_request_rows_against_a_dict(data):
    """Any mix of append, move and release_until leaves what a position -> row dict would hold."""
    rows = RequestRows(data.draw(st.integers(0, 5)))
    model: dict[int, int] = {}
    fresh = iter(range(10_000))
    for _ in range(data.draw(st.integers(0, 12))):
        action = data.draw(st.sampled_from(["append", "one", "move", "release_until"]))
        if action == "append":
            new = [next(fresh) for _ in range(data.draw(st.integers(0, 90)))]
            model |= {rows.end + i: row for i, row in enumerate(new)}
            rows.append(ids(*new))
        elif action == "one":
            model[rows.end] = next(fresh)
            rows.append_one(model[rows.end])
        elif action == "move":
            begin, end = sorted(data.draw(st.tuples(st.integers(0, 200), st.integers(0, 200))))
            assert rows.move(begin, end).tolist() == [model.pop(i, NO_ROW) for i in range(begin, end)]
        else:
            position, begin, end = data.draw(st.integers(0, 200)), rows.start, rows.end
            dropped = [model.pop(i, NO_ROW) for i in range(begin, max(begin, min(position, end)))]
            assert rows.release_until(position).tolist() == dropped
            assert (rows.start, rows.end) == (begin + len(dropped), end)
        assert rows.ids.tolist() == [model.get(i, NO_ROW) for i in range(rows.start, rows.end)]
