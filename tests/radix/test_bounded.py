"""Hits within a bound of what they leave out, through SGLang's tree: what is served is within it, and what is not is
not served. CheckedScheduler knows the gates of every prefix."""

import random

import pytest
from checked_scheduler import CheckedScheduler, serve

from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.radix.boundary import RESIDUAL
from sglang_tailreplay.scheduling import report

TEXT = [1 + (i * i) % 7 for i in range(48)]


def scheduler(residual, rows=96, anchors=9, interval=0, overlap=False, **config) -> CheckedScheduler:
    settings = dict(ratio=0.05, min_tokens=4, max_residual=residual, anchor_interval=interval) | config
    return CheckedScheduler(TailReplayConfig(**settings), rows, overlap, anchors if interval else 0)


def hits(server: CheckedScheduler) -> list:
    """(m, matched, replayed, start, residual) of hits that leave TEXT, which came in passes of 9, at each token m."""
    found = []
    server.arrive(TEXT, 1)
    while not server.idle:
        server.prefill(9, lambda: 1)
    for m in range(5, len(TEXT)):
        told = report(serve(server, [*TEXT[:m], 90 + m]))
        keys = ("matched", "replayed", "start", "residual")
        found.append((m, *(told.get(f"tail_replay_{key}") for key in keys)))
    return found


def test_tails_grow_as_far_as_need_be():
    loose, tight = hits(scheduler(0.9)), hits(scheduler(0.02))
    assert all(m == matched for m, matched, *_ in (*loose, *tight)), "with all rows there every hit can be served"
    assert {start for *_, start, _ in tight} == {"exact", "zero"}
    for (m, _, short, *_), (_, _, long, start, residual) in zip(loose, tight, strict=True):
        assert short <= long and residual <= 0.02 and (start == "zero" or long == m)
    assert any(short < long < m for (_, _, short, *_), (m, _, long, *_) in zip(loose, tight, strict=True))


def test_a_hit_shrinks_where_no_tail_that_it_may_have_is_enough():
    found = hits(scheduler(0.02, max_tokens=16))
    cut = [(m, matched, replayed, start) for m, matched, replayed, start, _ in found if matched != m]
    assert cut and all(matched < m and 0 < matched and replayed <= 16 for m, matched, replayed, _ in cut)
    assert all(residual <= 0.02 for *_, residual in found)
    assert any(start == "zero" for *_, start, _ in found), "some tails are enough"


def test_with_nothing_to_go_by_a_hit_is_refused():
    """Gates that have not arrived decay nothing, and the store has too few rows for a whole replay."""
    server = scheduler(0.5, rows=20, max_tokens=16)
    serve(server, TEXT)
    server.decays.decays.given_out(server.cache.rows.pool._stack.copy())  # of rows in use as well
    req = server.arrive([*TEXT[:40], 99], 1)
    server.match(req)
    assert len(req.prefix_indices) == 0 and req.tail_replay_shrunk.reason == RESIDUAL


def test_states_within_reach_make_up_for_short_tails():
    found = hits(scheduler(1e-6, interval=8, max_tokens=16, anchors=90))
    assert all(matched == m and start == "exact" for m, matched, _, start, _ in found)


@pytest.mark.parametrize("seed", range(4))
def test_crowded_servers_keep_the_bound(seed):
    """Requests that extend and leave each other, with too few rows, KV and anchors, some taken back."""
    chance = random.Random(seed)
    server = scheduler(
        chance.choice([0.3, 0.02]),
        rows=chance.choice([96, 50]),
        interval=chance.choice([0, 10]),
        overlap=bool(seed % 2),
        max_tokens=chance.choice([None, 12, 20]),
    )
    texts = [TEXT, TEXT[:30] + [50] * 18]
    for _ in range(12):
        for _ in range(chance.randrange(1, 3)):
            text = chance.choice(texts)
            prompt = text[: chance.randrange(1, len(text))][:44] + [chance.randrange(60, 70)] * chance.randrange(1, 6)
            texts.append(server.accounts[server.arrive(prompt, chance.randrange(1, 6)).rid].tokens)
        for _ in range(6):
            server.prefill(chance.choice([64, 9]), lambda: chance.randrange(3), mixed=chance.random() < 0.3)
            server.decode(lambda: chance.randrange(3), retract=int(chance.random() < 0.1))
