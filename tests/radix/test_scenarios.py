"""Single stories that random work led to, told in order."""

import gc

import pytest
from checked_scheduler import KV_SLOTS, CheckedScheduler, finish, serve
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tailreplay.config import TailReplayConfig


def scheduler(rows: int, ratio: float = 1.0, overlap: bool = False, **settings) -> CheckedScheduler:
    return CheckedScheduler(TailReplayConfig(ratio=ratio, min_tokens=4, **settings), rows, overlap)


def has_rows(server: CheckedScheduler, tokens: list[int]) -> list[bool]:
    return [server.truth[prefix].has_row for prefix in server.prefixes.path(tokens)]


@pytest.mark.parametrize("free", [0, 1, 4, 7])
def test_rows_of_cached_tokens_make_room_whatever_is_free(free):
    server = scheduler(rows=8 + free)
    serve(server, [1] * 8)
    assert server.cache.rows.pool.free_rows == free
    serve(server, [2] * 8)
    assert has_rows(server, [2] * 8) == [True] * 8


def test_a_store_without_room_keeps_the_last_tokens():
    server = scheduler(rows=6, ratio=0.1)
    serve(server, [1] * 16)
    assert has_rows(server, [1] * 16) == [False] * 10 + [True] * 6
    assert len(serve(server, [1] * 16 + [2]).prefix_indices) == 16
    assert server.accounts["r1"].generation == 1


def test_the_part_of_a_split_node_that_has_no_rows_is_no_holder():
    server = scheduler(rows=8, overlap=True)
    serve(server, [1] * 8)  # one node of 9 tokens: the step that ran too many found no row
    assert has_rows(server, [1] * 9) == [True] * 8 + [False]
    serve(server, [1] * 8 + [2])
    assert has_rows(server, [1] * 8 + [2]) == [True] * 8 + [False]


def crowd(server: CheckedScheduler) -> None:
    """A running request whose 16 rows nobody can take."""
    server.arrive([2] * 16, max_new_tokens=8)
    server.prefill(64, lambda: 2)


def disperse(server: CheckedScheduler, waiting) -> None:
    """It is gone, with its KV and rows; what `waiting` would hit was used later and stays."""
    server.abort(1)  # the running one, behind the waiting one
    server.drain()
    assert not server.running
    server.match(waiting)
    server.evict_kv(17)
    assert not server.truth.keys() & set(server.prefixes.path([2] * 16))


def test_a_node_with_rows_in_its_middle_takes_only_what_it_lacks():
    server = scheduler(rows=24, overlap=True)
    crowd(server)
    server.arrive([1] * 12, max_new_tokens=1)
    server.prefill(64, lambda: 1)
    server.decode(lambda: 1)  # a step too many for the new request
    assert has_rows(server, [1] * 13) == [False] * 4 + [True] * 8 + [False]
    disperse(server, waiting=server.arrive([1] * 13 + [3], max_new_tokens=1))
    assert has_rows(server, [1] * 13) == [False] * 4 + [True] * 8 + [False]
    finish(server)
    assert has_rows(server, [1] * 13 + [3]) == [True] * 14


def test_rows_of_a_later_replay_raise_the_generation_of_the_node_that_takes_them():
    server = scheduler(rows=32, ratio=0.1, overlap=True)
    crowd(server)
    server.arrive([1] * 24, max_new_tokens=1)
    server.prefill(16, lambda: 1)
    server.prefill(16, lambda: 1)
    server.decode(lambda: 1)
    assert has_rows(server, [1] * 25) == [True] * 16 + [False] * 9
    healer = server.arrive([1] * 25 + [3], max_new_tokens=1)
    disperse(server, waiting=healer)
    assert len(healer.prefix_indices) == 16
    finish(server)
    assert has_rows(server, [1] * 25 + [3]) == [True] * 26
    node = server.cache.tree_core.node_by_id(healer.last_node)
    assert server.cache.rows.tail(node, 0).generation == 1


def test_rows_of_a_request_that_was_never_released_come_back_with_its_last_reference():
    server = scheduler(rows=24)
    server.arrive([1] * 8, max_new_tokens=8)
    server.prefill(64, lambda: 1)
    server.decode(lambda: 1)
    server.decode(lambda: 1)
    server.drain()
    used = server.cache.rows.pool.used_rows
    lost = server.lose(0)
    assert server.cache.rows.pool.used_rows == used == 10
    del lost
    gc.collect()
    server.check()
    assert server.cache.rows.pool.used_rows == 8  # the prompt's, in the tree


def test_a_request_goes_on_with_its_own_tokens_where_the_tree_has_approximate_ones():
    """Refused by the limit, computed exactly, and then not exchanged for what it was refused."""
    server = scheduler(rows=64, ratio=0.1, max_generation=0)
    serve(server, [1] * 20, answer=1)
    serve(server, [1] * 10 + [3] * 6, answer=4)  # ten tokens matched, one of them replayed
    path = server.prefixes.path([1] * 10 + [3] * 6)
    assert [server.generations[prefix] for prefix in path] == [0] * 10 + [1] * 6
    own = server.arrive([1] * 10 + [3] * 8, max_new_tokens=4, ratio=1.0)
    server.prefill(64, lambda: 1)
    assert (own.cache_protected_len, len(own.prefix_indices), own.tail_replay.generation) == (10, 18, 0)
    finish(server)  # every step checks that attention reads nothing of a later generation, and that no slot is lost
    assert [server.generations[prefix] for prefix in path] == [0] * 10 + [1] * 6
    server.evict_kv(KV_SLOTS)
    serve(server, [1] * 10 + [3] * 8, answer=4)
    assert [server.generations[prefix] for prefix in path] == [0] * 16


@pytest.mark.parametrize(("limit", "matched"), [(None, 7), (7, 7), (20, 7), (3, 3), (0, 0)])
def test_a_request_may_limit_what_it_takes(limit, matched):
    """In the middle of a node too; and what lies behind stays as it is."""
    server = scheduler(rows=24)
    serve(server, range(8))
    server.cache.limit_of = lambda req: limit
    req = server.arrive(range(8), max_new_tokens=1)
    key = RadixKey(req.origin_input_ids, req.extra_key, limit=7)
    found = server.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    assert len(found.device_indices) == matched and req.tail_replay_shrunk is None
    server.cache.check_invariants()
    whole = server.cache.match_prefix(MatchPrefixParams(key=RadixKey(req.origin_input_ids, req.extra_key)))
    assert len(whole.device_indices) == 8


def test_overridden_embeddings_neither_use_nor_leave_cached_tokens():
    """Their token ids are placeholders: whoever sends the same ids as plain text must not get their KV."""
    server = scheduler(rows=24)
    serve(server, [1] * 8)
    req = server.arrive([1] * 8, max_new_tokens=1)
    req.positional_embed_overrides = object()
    key = RadixKey(req.origin_input_ids, req.extra_key)
    match = server.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    assert len(match.device_indices) == 0
    assert req.extra_key == f"tail_replay:{req.rid}"  # what SGLang will insert it under
