"""Anchors in the tree: where they are taken, which one a hit begins at, and how they move and go."""

import pytest
from checked_scheduler import CheckedScheduler, finish, serve

from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.scheduling import report


def scheduler(
    interval=8, anchors=9, rows=96, ratio=0.05, inside=False, ends=False, overlap=False, **config
) -> CheckedScheduler:
    """`inside`: passes save states inside of them, too, as those outside of graphs do. `ends`: so do requests."""
    config = TailReplayConfig(ratio=ratio, min_tokens=4, anchor_interval=interval, **config)
    server = CheckedScheduler(config, rows, overlap, anchors=anchors)
    if not inside:
        server.planner.keeps_beyond = None
    if not ends:
        server.cache.rows.before_finish = lambda req, tokens: None
    return server


def positions(server, tokens):
    """Positions of the anchors on the path of cached tokens."""
    found, node, end = [], server.cache.root_node, 0
    while node is not None:
        begins_with = {next(iter(child.key)): child for child in node.children.values()}
        node = begins_with.get(tokens[end]) if end < len(tokens) else None
        if node is not None:
            found += [end + offset for offset in sorted(server.cache.rows.anchors.of(node))]
            end += len(node.key)
    return found


TEXT = list(range(1, 31))


def admitted(server, prompt):
    """(matched, replayed, anchored, generation) of a request."""
    rows = serve(server, prompt).tail_replay
    return rows.boundary, rows.replayed, rows.anchored, rows.answer_generation


def test_anchors_lie_an_interval_apart_at_ends_of_passes():
    server = scheduler(interval=8)
    server.arrive(TEXT, 20)
    server.prefill(9, lambda: 1)  # chunks of 9: [0, 9) [9, 18) [18, 27) [27, 30)
    while not server.idle:
        server.prefill(9, lambda: 1)
        server.decode(lambda: 1)
    # 30 is only 3 behind 27; decoding goes on in steps of 8
    assert positions(server, TEXT + [1] * 19) == [9, 18, 27, 35, 43]


@pytest.mark.parametrize("m, anchor", [(20, 18), (18, 18), (17, 9), (9, 9), (30, 27)])
def test_a_hit_begins_at_the_newest_anchor_before_it(m, anchor):
    server = scheduler()
    server.arrive(TEXT + [90], 1)
    while not server.idle:
        server.prefill(9, lambda: 1)
    assert admitted(server, TEXT[:m] + [99, 98]) == (m, m - anchor, True, 0)


def test_what_is_built_on_an_exact_hit_is_exact_and_what_is_not_is_not():
    server = scheduler(interval=4)
    serve(server, TEXT[:25])  # one pass: an anchor at 25; reach is 8
    assert admitted(server, TEXT[:10] + [50] * 3)[2:] == (False, 1)
    assert admitted(server, TEXT[:25] + [60] * 3)[2:] == (True, 0)
    assert admitted(server, TEXT[:10] + [50] * 2 + [51])[3] == 2, "approximate on approximate"
    assert admitted(server, TEXT[:8] + [70, 71]) == (8, 8, False, 0), "all of it is as good as a state"


def test_a_state_behind_an_approximation_says_so():
    server = scheduler(interval=4)
    serve(server, TEXT[:14])
    serve(server, TEXT[:10] + [50] * 30)  # behind a tail of 4: generation 1, with an anchor at 40
    assert admitted(server, TEXT[:10] + [50] * 30 + [7, 7]) == (40, 0, True, 1)


def exact_tokens_beside_an_approximate_state(**config):
    """TEXT, whose tokens from 10 on come of an exact replay, while a request that came by an approximate one saves
    its state at 16."""
    server = scheduler(interval=4, **config)
    serve(server, TEXT[:14])
    whole = TEXT[:10] + [50] * 20
    server.arrive(whole, 1, ratio=1.0)
    server.arrive([*whole, 60], 1)
    server.prefill(20 + 6, lambda: 1)
    finish(server)
    assert 16 not in positions(server, whole)
    return server, whole


def test_an_approximate_state_is_not_saved_beside_exact_tokens():
    server, whole = exact_tokens_beside_an_approximate_state()
    req = server.arrive([*whole[:17], 99, 98], 1, ratio=1.0)
    finish(server)
    assert (req.tail_replay.boundary, req.tail_replay.answer_generation) == (17, 0), "r = 1 is exact"


def test_a_state_adds_no_generation_to_what_a_limit_lets_a_hit_take():
    server, whole = exact_tokens_beside_an_approximate_state(max_generation=0)
    assert admitted(server, [*whole[:27], 99])[::3] == (27, 1)


def test_the_reach_is_bounded():
    server = scheduler(interval=5)
    serve(server, TEXT)  # one pass, an anchor at 30 only
    serve(server, TEXT[:6])
    server = scheduler(interval=5)
    serve(server, TEXT[:6])  # an anchor at 6
    serve(server, TEXT)  # and at 30
    assert admitted(server, TEXT[:16] + [99, 98]) == (16, 10, True, 0)
    req = serve(server, TEXT[:17] + [99, 97])
    assert report(req) == {
        "tail_replay_matched": 17,
        "tail_replay_replayed": 4,
        "tail_replay_generation": 1,
        "tail_replay_start": "seeded",  # the state at 6 is better than none
        "tail_replay_anchored": 1,
    }


def test_rows_are_missing_behind_the_anchor():
    """The boundary shrinks to where a replay is possible; an anchor right there needs no rows at all."""
    server = scheduler(interval=8)
    server.arrive(TEXT[:20] + [90], 1)
    while not server.idle:
        server.prefill(10, lambda: 1)
    _, second, *_ = server.cache.rows._holders.values()  # tokens [10, 20)
    server.cache.rows._drop_rows(second)
    server.check(evicts_rows=True)
    assert admitted(server, TEXT[:15] + [99, 98]) == (10, 0, True, 0)


@pytest.mark.parametrize("cut", [5, 9, 10, 18, 29])
def test_anchors_move_with_the_parts_of_a_split_node(cut):
    server = scheduler()
    server.arrive(TEXT + [90], 1)
    while not server.idle:
        server.prefill(9, lambda: 1)
    serve(server, TEXT[:cut] + [70])
    assert positions(server, TEXT) == [9, 18, 27]


def test_a_full_store_gives_up_what_was_used_longest_ago():
    server = scheduler(interval=8, anchors=2)
    texts = [[n] * 10 for n in (1, 2, 3)]
    for text in texts:
        serve(server, text)
    assert [positions(server, text) for text in texts] == [[], [10], [10]]
    serve(server, texts[1] + [50])
    serve(server, [4] * 10)
    assert [positions(server, text) for text in [*texts, [4] * 10]] == [[], [10], [], [10]]


def test_a_full_store_gives_up_the_anchor_whose_loss_costs_a_hit_least():
    """Of those used longest ago as of all others: the one nearest behind another, and not the last one again."""
    server = scheduler(interval=4, anchors=5)
    server.arrive(TEXT[:26], 1)
    for chunk in (8, 4, 8, 6):  # anchors at 8, 12, 20, 26, worth 8 (the reach), 4, 8, 6
        server.prefill(chunk, lambda: 1)
    finish(server)
    serve(server, [50] * 5)  # worth 5
    assert positions(server, TEXT) == [8, 12, 20, 26]
    for first, left in ((51, [8, 20, 26]), (52, [8, 20, 26]), (53, [8, 20])):
        serve(server, [first] * 4)  # worth 4, but used later: 4 more than the one at 12, and so on
        assert positions(server, TEXT) == left
    assert positions(server, [50] * 5) == [] and positions(server, [51] * 4) == [4]
    assert server.cache.rows.anchors.evicted == 3


def test_an_anchor_that_hits_begin_at_stays():
    server = scheduler(interval=8, anchors=3)
    serve(server, TEXT[:10])
    for n in range(20):
        text = [40 + n] * 12  # worth two more than the first one, and used later
        serve(server, text)
        assert admitted(server, TEXT[:10] + [60 + n])[2], n
    server = scheduler(interval=8, anchors=3)
    serve(server, TEXT[:10])
    for n in range(20):
        serve(server, [40 + n] * 12)
    assert positions(server, TEXT) == []


def test_an_anchor_goes_with_the_rows_that_it_refines():
    server = scheduler(interval=4)
    server.arrive(TEXT[:12] + [90], 1)
    for chunk in (5, 8):
        server.prefill(chunk, lambda: 1)
    finish(server)
    serve(server, TEXT[:8] + [70])  # the tokens [5, 13) are cut at 8
    assert positions(server, TEXT[:12] + [90]) == [5, 13]
    begin, *_ = server.cache.rows._holders.values()
    assert len(begin.key) == 5
    server.cache.rows._drop_rows(begin)
    assert positions(server, TEXT[:12]) == [5, 13], "the rows behind it are another node's"
    server.check(evicts_rows=True)


def test_rows_dropped_behind_an_anchor_take_it_along():
    server = scheduler(interval=8, inside=True)
    serve(server, TEXT)  # one node with anchors inside of it
    assert positions(server, TEXT) == [8, 16, 24]
    (node,) = server.cache.rows._holders.values()
    server.cache.rows._drop_rows(node)
    assert positions(server, TEXT) == []
    server.check(evicts_rows=True)


def test_two_requests_with_the_same_prompt_leave_one_anchor():
    server = scheduler()
    for _ in range(2):
        server.arrive(TEXT, 1)
    finish(server)
    assert positions(server, TEXT) == [30]
    assert server.cache.rows.anchors.pool.used_rows == 1


def test_eviction_and_flush_free_them():
    server = scheduler()
    serve(server, TEXT)
    assert server.cache.rows.anchors.pool.used_rows == 1
    server.evict_kv(96)
    assert server.cache.rows.anchors.pool.used_rows == 0
    serve(server, TEXT)
    server.flush()


def test_a_retracted_request_gives_its_anchors_back():
    server = scheduler(interval=4)
    server.arrive(TEXT[:9], 20)
    server.prefill(64, lambda: 1)
    for _ in range(9):
        server.decode(lambda: 1)
    assert server.running[0].tail_replay.anchors
    server.decode(lambda: 1, retract=1)
    server.check()


def test_a_full_tail_needs_no_anchor_but_takes_the_shorter_way():
    server = scheduler(ratio=1.0)
    server.arrive(TEXT + [90], 1)
    while not server.idle:
        server.prefill(9, lambda: 1)
    assert admitted(server, TEXT[:20] + [99, 98]) == (20, 2, True, 0)


def test_no_interval_no_anchors():
    server = scheduler(interval=0)
    serve(server, TEXT)
    assert positions(server, TEXT) == []
    assert admitted(server, TEXT[:20] + [99])[2] is False


def test_a_pass_leaves_anchors_inside_of_it():
    """Chunks of 4 in passes of more than 8 tokens; the positions count from where the request's part begins."""
    server = scheduler(interval=8, inside=True)
    serve(server, TEXT)
    assert positions(server, TEXT) == [8, 16, 24]
    again = TEXT[:17] + [60 + i for i in range(12)]
    assert admitted(server, again + [99]) == (17, 1, True, 0)
    assert positions(server, again) == [8, 16, 25]
    assert admitted(server, again[:28] + [98]) == (28, 3, True, 0)


def test_an_anchor_that_a_hit_begins_at_outlives_its_batch():
    """A store of one place: the state that the hit needs may not be given away to what the same pass computes."""
    server = scheduler(interval=8, anchors=1, inside=True)
    serve(server, TEXT[:8])
    assert admitted(server, TEXT[:8] + [50 + i for i in range(20)]) == (8, 0, True, 0)
    assert positions(server, TEXT[:8]) == [8]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_leaves_an_anchor_at_its_end(overlap):
    """Where the next turn begins. With overlap scheduling one pass more has run; its token is in the tree as well."""
    server = scheduler(interval=20, ends=True, overlap=overlap)
    server.arrive(TEXT[:25], 9)
    server.prefill(64, lambda: 1)
    while not server.idle:
        server.decode(lambda: 1)
    end = 34 if overlap else 33
    history = (TEXT[:25] + [1] * 9)[:end]
    assert positions(server, history) == [25, end]
    assert admitted(server, history + [99, 98])[:3] == (end, 0, True)


def test_a_request_whose_last_pass_is_only_planned_saves_nothing_at_its_end(monkeypatch):
    """SGLang may process results between plan and launch (SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP, mixed chunks):
    the tree gets a token more than the state has seen."""
    server = scheduler(interval=20, ends=True, overlap=True)
    server.arrive(TEXT[:15], 9)
    server.prefill(64, lambda: 1)
    server.decode(lambda: 1)
    (req,) = server.running
    monkeypatch.setattr(server, "_forward", lambda *planned: server.planner.before_finish(req, req.tail_replay.end))
    server.decode(lambda: 1)
    assert req.tail_replay.end == 17 and not req.tail_replay.anchors


def test_an_end_too_near_to_the_last_anchor_saves_nothing():
    server = scheduler(interval=20, ends=True)
    serve(server, TEXT[:25], 4)
    assert positions(server, TEXT[:25] + [1] * 3) == [25]


def test_an_aborted_request_and_one_that_goes_back_to_the_queue_save_nothing_at_their_ends():
    server = scheduler(interval=8, ends=True, inside=True)
    server.arrive(TEXT[:6], 9)
    server.prefill(64, lambda: 1)
    server.decode(lambda: 1)
    server.decode(lambda: 1, retract=1)
    assert server.cache.rows.anchors.pool.used_rows == 0


def test_a_chunk_that_is_aborted_gives_its_anchors_back():
    server = scheduler(interval=4, inside=True, ends=True)
    server.arrive(TEXT, 1)
    server.prefill(12, lambda: 1)
    assert sorted(server.chunked.tail_replay.anchors) == [4, 8, 12]
    server.prefill(10, lambda: 1)  # the first chunk is in the tree now
    server.abort(0)
    server.drain()
    assert server.idle
    assert positions(server, TEXT) == [4, 8, 12]
    assert server.cache.rows.anchors.pool.used_rows == 3
    server.flush()
