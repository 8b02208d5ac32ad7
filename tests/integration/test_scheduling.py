"""Rows and tails of a batch, on a cache that holds one prefix."""

import math
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.pass_anchors import Keep
from sglang_tailreplay.radix.boundary import GENERATION, ROWS_MISSING, Shrunk
from sglang_tailreplay.radix.decays import Decays
from sglang_tailreplay.radix.rows import NO_ROW, Anchor, RequestRows, RowPool, no_rows
from sglang_tailreplay.request_settings import RATIO_PARAM
from sglang_tailreplay.residual import ResidualBound
from sglang_tailreplay.scheduling import (
    Admission,
    Planner,
    has_plain_tokens,
    mark_internal,
    report,
)
from sglang_tailreplay.step import Hit, Sample, Step, mix

PREFIX = 100  # tokens in the tree; token i has row 1000 + i


class FakeRows:
    """TailReplayComponent's side of the planner, with one path of one generation."""

    def __init__(self, capacity: int, generation: int):
        self.pool = RowPool(capacity)
        self.generation = generation
        self.stored = np.arange(1000, 1000 + PREFIX)
        self.anchors = SimpleNamespace(used=lambda ids: None)

    def track(self, req) -> RequestRows:
        if not hasattr(req, "tail_replay"):
            req.tail_replay = RequestRows()
        return req.tail_replay

    def release(self, rows: RequestRows) -> None:
        self.pool.free(rows.release())

    def alloc(self, n: int) -> np.ndarray:
        ids = self.pool.alloc(n)
        return np.concatenate((no_rows(n - len(ids)), ids))

    def tail(self, node: int, k: int):
        """node is the boundary itself."""
        return SimpleNamespace(rows=self.stored[node - k : node], generation=self.generation if node else 0)


class FakeCache:
    def __init__(self, capacity: int = 500, generation: int = 0):
        self.rows = FakeRows(capacity, generation)
        self.tree_core = SimpleNamespace(node_by_id=lambda node: node)


def planner(capacity=500, generation=0, **settings) -> Planner:
    admissions = []
    made = Planner(TailReplayConfig(**{"ratio": 0.25, "min_tokens": 4, **settings}), admissions.append)
    made.admissions = admissions
    made.attach(FakeCache(capacity, generation))
    return made


def request(matched: int, extend: int, fresh=True, ratio=None, **attributes) -> SimpleNamespace:
    """A request whose tokens [matched, matched + extend) are computed now; token i has id 7 + i."""
    params = {RATIO_PARAM: ratio} if ratio is not None else None
    values = dict(
        rid="r",
        prefix_indices=range(matched),
        last_node=matched,
        extend_range=SimpleNamespace(length=extend),
        full_untruncated_fill_ids=list(range(7, 7 + matched + extend)),
        mamba_needs_clear=fresh,
        mamba_pool_idx=torch.tensor(3),
        kv_committed_len=matched + extend,
        sampling_params=SimpleNamespace(custom_params=params),
        multimodal_inputs=None,
        input_embeds=None,
        positional_embed_overrides=None,
    )
    return SimpleNamespace(**{**values, **attributes})


# ---- prefill ----


def test_a_cold_request_gets_rows_and_no_hit():
    p, req = planner(), request(0, 5)
    step = p.plan_extend([req])
    assert step.rows.tolist() == [0, 1, 2, 3, 4] and step.rows.dtype == np.int64 and step.hits == ()
    rows = req.tail_replay
    assert (rows.start, rows.end, rows.boundary, rows.replayed, rows.generation) == (0, 5, 0, 0, 0)
    assert p.admissions == [Admission(0, 0, None, prompt=5)]


def test_a_hit_has_the_rows_and_tokens_of_its_tail():
    p, req = planner(generation=2), request(40, 5)
    step = p.plan_extend([req])
    (hit,) = step.hits
    # [0, 30) KV reused   [30, 40) KV reused, state replayed   [40, 45) ordinary prefill
    assert hit.rows.tolist() == list(range(1030, 1040)) and hit.token_ids.tolist() == list(range(37, 47))
    assert hit.rows.dtype == hit.token_ids.dtype == np.int64
    assert hit.rid == "r" and hit.slot is req.mamba_pool_idx
    assert step.rows.tolist() == [0, 1, 2, 3, 4]
    rows = req.tail_replay
    assert (rows.start, rows.end, rows.boundary, rows.replayed) == (40, 45, 40, 10)
    assert p.admissions == [Admission(40, 10, None, prompt=45)]


def test_a_later_chunk_is_no_hit_and_appends():
    p, req = planner(generation=5), request(40, 5)
    p.plan_extend([req])
    req.mamba_needs_clear, req.prefix_indices, req.extend_range.length = False, range(45), 3
    step = p.plan_extend([req])
    assert step.hits == () and step.rows.tolist() == [5, 6, 7]
    rows = req.tail_replay
    assert (rows.start, rows.end, rows.boundary, rows.replayed, rows.generation) == (40, 48, 40, 10, 6)
    assert rows.ids.tolist() == list(range(8)) and len(p.admissions) == 1


def test_rows_and_hits_of_a_batch_are_in_the_order_of_its_requests():
    p = planner()
    cold, hit, chunk = request(0, 2), request(20, 3, rid="hit"), request(8, 1, fresh=False)
    other = request(12, 1, rid="other")
    step = p.plan_extend([cold, hit, chunk, other])
    assert [h.rid for h in step.hits] == ["hit", "other"]
    assert step.rows.tolist() == list(range(7))
    assert [req.tail_replay.ids.tolist() for req in (cold, hit, chunk, other)] == [[0, 1], [2, 3, 4], [5], [6]]


def test_an_empty_batch():
    step = planner().plan_extend([])
    assert step.rows.tolist() == [] and step.rows.dtype == np.int64 and step.hits == ()


@pytest.mark.parametrize(
    "matched, ratio, k, behind", [(40, None, 10, 1), (40, 1.0, 40, 0), (3, None, 3, 0), (5, None, 4, 1), (0, 1.0, 0, 0)]
)
@pytest.mark.parametrize("generation", [0, 3])
def test_a_replay_of_less_than_everything_is_one_more_generation(matched, ratio, k, behind, generation):
    p, req = planner(generation=generation), request(matched, 2, ratio=ratio)
    step = p.plan_extend([req])
    assert [len(hit.rows) for hit in step.hits] == ([k] if k else [])
    assert req.tail_replay.generation == (generation if matched else 0) + behind
    assert req.tail_replay.replayed == k


def test_zero_mode_reuses_kv_and_replays_nothing():
    p, req = planner(generation=1, mode="zero"), request(40, 5)
    assert p.cache.tail_length_of(req) is None
    step = p.plan_extend([req])
    assert step.hits == () and len(step.rows) == 5
    assert (req.tail_replay.boundary, req.tail_replay.replayed, req.tail_replay.generation) == (40, 0, 2)
    assert p.admissions == [Admission(40, 0, None, prompt=45)]
    cold = request(0, 5)
    p.plan_extend([cold])
    assert cold.tail_replay.generation == 0


@pytest.mark.parametrize("reason", [ROWS_MISSING, GENERATION])
def test_a_shrunk_hit_is_reported(reason):
    p = planner()
    cut = request(40, 5, tail_replay_shrunk=Shrunk(64, 40, reason))
    p.plan_extend([cut, request(40, 5, tail_replay_shrunk=None)])
    shrunk, whole = Admission(40, 10, 64, shrunk_by=reason, prompt=45), Admission(40, 10, None, prompt=45)
    assert p.admissions == [shrunk, whole]


def test_a_tail_that_lost_a_row_is_an_error():
    p = planner()
    p.cache.rows.stored[35] = NO_ROW
    p.plan_extend([request(35, 1)])
    with pytest.raises(AssertionError, match="the tail of a 40-token hit lost its rows"):
        p.plan_extend([request(40, 1)])


def test_a_full_store_leaves_the_first_tokens_without_a_row():
    step = planner(capacity=3).plan_extend([request(0, 5)])
    assert step.rows.tolist() == [NO_ROW, NO_ROW, 0, 1, 2]


PLAIN = ("multimodal_inputs", "input_embeds", "positional_embed_overrides")


@pytest.mark.parametrize("what", PLAIN)
def test_what_is_more_than_token_ids_gets_no_row(what):
    p, req = planner(), request(0, 3, **{what: object()})
    assert not has_plain_tokens(req) and has_plain_tokens(request(0, 3))
    assert p.plan_extend([req]).rows.tolist() == [NO_ROW] * 3
    assert req.tail_replay.end == 3 and p.cache.rows.pool.used_rows == 0


def test_attaching_tells_the_cache_whom_to_serve():
    cache = planner().cache
    own = request(0, 3)
    mark_internal(own)
    image = request(0, 3, multimodal_inputs=object())
    assert [cache.may_reuse(req) for req in (request(0, 3), image, own)] == [True, False, False]
    assert cache.max_generation is None and planner(max_generation=2).cache.max_generation == 2
    assert [cache.tail_length_of(request(0, 1))(m) for m in (0, 3, 8, 40, 101)] == [0, 3, 4, 10, 26]
    assert cache.tail_length_of(request(0, 1, ratio=1))(40) == 40
    assert planner(max_tokens=6).cache.tail_length_of(request(0, 1))(40) == 6


# ---- decode ----


def test_decode_gives_every_request_one_row_at_its_position():
    p, a, b = planner(), request(0, 2), request(40, 3)
    p.plan_extend([a, b])
    for req in (a, b):
        req.kv_committed_len += 1
    step = p.plan_decode([a, b])
    assert step.rows.tolist() == [5, 6] and step.hits == ()
    assert (a.tail_replay.ids.tolist(), a.tail_replay.end) == ([0, 1, 5], 3)
    assert (b.tail_replay.ids.tolist(), b.tail_replay.end) == ([2, 3, 4, 6], 44)
    assert p.admissions == [Admission(0, 0, None, prompt=2), Admission(40, 10, None, prompt=43)]


def test_what_is_said_about_an_image_takes_no_row():
    p, image, text = planner(), request(0, 2, multimodal_inputs=object()), request(40, 3)
    p.plan_extend([image, text])
    for req in (image, text):
        req.kv_committed_len += 1
    assert p.plan_decode([image, text]).rows.tolist() == [NO_ROW, 3]
    assert (image.tail_replay.ids.tolist(), image.tail_replay.end) == ([NO_ROW] * 3, 3)
    assert p.cache.rows.pool.used_rows == 4


def test_decode_in_a_full_store_goes_on_without_rows():
    p, req = planner(capacity=2), request(0, 2)
    p.plan_extend([req])
    req.kv_committed_len += 1
    assert p.plan_decode([req]).rows.tolist() == [NO_ROW]
    assert req.tail_replay.ids.tolist() == [0, 1, NO_ROW]


# ---- starting over ----


@pytest.mark.parametrize("matched", [0, 40])
def test_a_retracted_request_gives_its_rows_back(matched):
    p, req = planner(), request(0, 60)
    p.plan_extend([req])
    assert p.cache.rows.pool.used_rows == 60
    again = request(matched, 60 - matched, tail_replay=req.tail_replay)
    step = p.plan_extend([again])
    rows = again.tail_replay
    assert (rows.start, rows.end) == (matched, 60) and rows.ids.tolist() == step.rows.tolist()
    assert p.cache.rows.pool.used_rows == 60 - matched
    p.cache.rows.pool.check_invariants([rows.ids])


def test_a_turn_that_starts_behind_a_gap_gives_its_rows_back():
    p, req = planner(), request(0, 4)
    p.plan_extend([req])
    req.kv_committed_len = 10
    p.plan_decode([req])
    assert (req.tail_replay.start, req.tail_replay.end) == (9, 10)
    p.cache.rows.pool.check_invariants([req.tail_replay.ids])


# ---- mixed batches ----


def step(*rows: int, hits=()) -> Step:
    return Step(np.array(rows, dtype=np.int64), hits)


def test_a_mixed_batch_has_the_running_tokens_last():
    hit = Hit("r", torch.tensor(0), no_rows(1), no_rows(1))
    mixed = mix(step(4, 5, hits=(hit,)), step(9, NO_ROW))
    assert mixed.rows.tolist() == [4, 5, 9, NO_ROW] and mixed.hits == (hit,)


def test_mixing_with_nothing_changes_nothing():
    prefill = step(4, 5)
    assert mix(prefill, None) is prefill
    assert mix(None, step(1)) is None and mix(None, None) is None


# ---- report ----


def test_an_answer_tells_what_was_matched_and_replayed():
    p, hit, cold = planner(generation=1), request(40, 5), request(0, 5)
    p.plan_extend([hit, cold])
    said = {"tail_replay_matched": 40, "tail_replay_replayed": 10, "tail_replay_generation": 2}
    assert report(hit) == {**said, "tail_replay_start": "zero"}
    assert report(cold) == {}
    assert report(SimpleNamespace()) == {}


class FakeAnchors:
    """Anchors of the one path by position, and places for more."""

    def __init__(self, anchors=(), places=9):
        self.anchors, self.pool = dict(anchors), RowPool(places)
        self.hit = set()

    def used(self, ids) -> None:
        self.hit |= set(ids)

    def before(self, node, m):
        return iter(sorted(((p, a) for p, a in self.anchors.items() if p <= m), reverse=True))

    def alloc(self, spared=()):
        ids = self.pool.alloc(1)
        return int(ids[0]) if len(ids) else None


def anchored(anchors=(), places=9, generation=0, **settings) -> Planner:
    made = planner(generation=generation, anchor_interval=16, **settings)
    made.cache.rows.anchors = FakeAnchors(anchors, places)
    return made


def test_a_replay_begins_at_the_newest_anchor():
    plan = anchored({20: Anchor(3, 0), 33: Anchor(5, 0), 41: Anchor(6, 0)})
    (hit,) = plan.plan_extend([request(40, 4)]).hits
    assert hit.anchor == 5 and len(hit.rows) == len(hit.token_ids) == 7
    assert plan.cache.rows.anchors.hit == {5}, "it would be given up as if nobody used it"
    assert hit.token_ids.tolist() == [7 + i for i in range(33, 40)]
    assert plan.admissions[0] == Admission(40, 7, None, anchored=True, start="exact", prompt=44)


@pytest.mark.parametrize("position, reached", [(8, True), (7, False)])
def test_an_anchor_two_intervals_away_is_reached(position, reached):
    req = request(40, 4)
    (hit,) = anchored({position: Anchor(1, 0)}).plan_extend([req]).hits
    assert hit.anchor == 1 and len(hit.rows) == (32 if reached else 10)
    assert (req.tail_replay.start_kind, req.tail_replay.generation) == (("exact", 0) if reached else ("seeded", 1))


def test_a_tail_on_an_older_state_is_not_made_longer():
    """Where it costs nothing a tail is rounded up, but it must not reach back to the state that it is put on."""
    plan = anchored({6: Anchor(1, 2)})
    plan.rounded = lambda k: 64
    req = request(60, 4)
    (hit,) = plan.plan_extend([req]).hits
    assert (hit.anchor, len(hit.rows)) == (1, 15)
    assert req.tail_replay.generation == 3
    (hit,) = anchored(ratio=1.0).plan_extend([request(60, 4)]).hits
    assert (hit.anchor, len(hit.rows)) == (None, 60)


def test_a_long_tail_reaches_as_far_as_it_is():
    (hit,) = anchored({4: Anchor(1, 0)}, ratio=1.0).plan_extend([request(40, 4)]).hits
    assert hit.anchor == 1 and len(hit.rows) == 36


def test_an_anchor_adds_no_generation_and_hides_none():
    for behind, saved, expected in ((0, 0, 0), (2, 0, 2), (0, 3, 3)):
        req = request(40, 4)
        anchored({33: Anchor(5, saved)}, generation=behind).plan_extend([req])
        assert req.tail_replay.generation == expected


def test_states_are_taken_an_interval_apart():
    plan = anchored()
    reqs = [request(0, 15), request(0, 16), request(0, 40)]
    step = plan.plan_extend(reqs)
    assert [take.anchor for take in step.takes] == [0, 1]
    assert [list(req.tail_replay.anchors) for req in reqs] == [[], [16], [40]]


class Store:
    """Which anchors are there."""

    def __init__(self):
        self.there = set()

    def forget(self, anchor):
        self.there.discard(anchor)

    def whole(self, anchor):
        return anchor in self.there


def test_a_state_that_is_not_whole_is_never_begun_at():
    plan = anchored({20: Anchor(3, 0), 33: Anchor(5, 0)})
    plan.saved = Store()
    plan.saved.there = {3, 5}
    assert plan.plan_extend([request(40, 1)]).hits[0].anchor == 5
    plan.saved.forget(5)
    (hit,) = plan.plan_extend([request(40, 1)]).hits
    assert (hit.anchor, len(hit.rows)) == (3, 20)
    plan.saved.forget(3)
    (hit,) = plan.plan_extend([request(40, 1)]).hits
    assert (hit.anchor, len(hit.rows)) == (None, 10)


def test_a_place_given_to_a_new_state_is_not_whole():
    plan = anchored(places=1)
    plan.saved = Store()
    plan.saved.there = {0}
    assert plan.plan_extend([request(0, 40)]).takes[0].anchor == 0
    assert not plan.saved.whole(0)


def test_states_inside_a_pass_lie_at_chunks_from_where_the_request_begins():
    plan = anchored(places=20)
    plan.keeps_beyond = 0
    reqs = [request(0, 200), request(10, 75), request(0, 15)]
    step = plan.plan_extend(reqs)
    assert step.keeps == (Keep(0, 1, 0), Keep(0, 2, 1), Keep(0, 3, 2), Keep(1, 1, 3))
    assert [sorted(req.tail_replay.anchors) for req in reqs] == [[64, 128, 192], [74], []]
    assert step.takes == (), "the ends lie less than an interval behind them"


def test_a_later_chunk_goes_on_where_the_last_one_ended():
    plan = anchored(places=20)
    plan.keeps_beyond = 0
    req = request(0, 70)
    assert plan.plan_extend([req]).keeps == (Keep(0, 1, 0),)
    later = request(70, 70, fresh=False, tail_replay=req.tail_replay)
    step = plan.plan_extend([later])
    assert step.keeps == (Keep(0, 1, 1),) and not step.takes
    assert sorted(req.tail_replay.anchors) == [64, 134]


@pytest.mark.parametrize("beyond, inside", [(None, 0), (200, 0), (199, 3)])
def test_only_passes_outside_of_graphs_save_states_inside(beyond, inside):
    plan = anchored(places=20)
    plan.keeps_beyond = beyond
    step = plan.plan_extend([request(0, 200)])
    assert (len(step.keeps), len(step.takes)) == (inside, 0 if inside else 1)


def test_no_interval_nothing_inside():
    plan = planner()
    plan.keeps_beyond = 0
    step = plan.plan_extend([request(0, 200)])
    assert step.keeps == step.takes == ()


def test_nothing_inside_of_what_is_more_than_tokens():
    plan = anchored()
    plan.keeps_beyond = 0
    assert plan.plan_extend([request(0, 200, multimodal_inputs=object())]).keeps == ()


def test_a_mixed_pass_saves_what_its_prefills_go_through():
    keep = Keep(0, 1, 3)
    mixed = mix(Step(no_rows(1), keeps=(keep,)), step(9))
    assert mixed.keeps == (keep,)


def test_a_full_store_takes_nothing():
    assert anchored(places=0).plan_extend([request(0, 40)]).takes == ()


def test_an_anchor_on_the_path_keeps_the_next_one_away():
    plan = anchored({33: Anchor(5, 0)})
    assert plan.plan_extend([request(40, 8)]).takes == ()
    assert len(plan.plan_extend([request(40, 9)]).takes) == 1


def test_an_image_is_not_saved():
    assert anchored().plan_extend([request(0, 40, multimodal_inputs=object())]).takes == ()


def test_the_answer_tells_the_worst_ground_that_it_stood_on():
    """A retracted request that starts over without a hit: its first tokens came from an approximation."""
    plan = planner(generation=1)
    req = request(40, 4)
    plan.plan_extend([req])
    assert report(req)["tail_replay_generation"] == 2
    req.prefix_indices, req.last_node, req.mamba_needs_clear = [], 0, True
    plan.cache.rows.release(req.tail_replay)
    plan.plan_extend([req])
    assert req.tail_replay.generation == 0 and report(req)["tail_replay_generation"] == 2


# ---- hits to verify ----


def test_a_hit_to_verify_is_told_of_in_the_pass_that_gives_its_next_token():
    p = planner()
    p.is_sampled = lambda: True
    cold, hit, long = request(0, 2), request(40, 5), request(20, 3, full_untruncated_fill_ids=list(range(30)))
    step = p.plan_extend([cold, hit, long])
    assert step.samples == (Sample(1, array("q", range(7, 52))),)
    long.mamba_needs_clear, long.prefix_indices, long.extend_range.length = False, range(23), 7
    decoding = Step(no_rows(1))
    assert mix(p.plan_extend([long]), decoding).samples == (Sample(0, array("q", range(30))),)
    assert p.plan_extend([long]).samples == ()  # told once


def test_a_hit_that_starts_over_as_a_miss_is_not_verified():
    p, req = planner(), request(40, 5, full_untruncated_fill_ids=list(range(50)))
    p.is_sampled = lambda: True
    p.plan_extend([req])
    req.prefix_indices, req.extend_range.length = range(0), 50
    assert p.plan_extend([req]).samples == ()


def test_hits_that_were_not_drawn_are_not_verified():
    assert planner().plan_extend([request(40, 5)]).samples == ()


def test_a_request_of_our_own_takes_no_rows_and_is_not_counted():
    p, req = planner(anchor_interval=1), request(0, 5)
    mark_internal(req)
    step = p.plan_extend([req])
    assert step.rows.tolist() == [NO_ROW] * 5 and step.hits == step.takes == step.samples == ()
    assert p.admissions == [] and not hasattr(req, "tail_replay") and p.cache.rows.pool.used_rows == 0


# ---- a bound on the residual ----


def bounded(largest: float, kept: float = 1.0, **settings) -> Planner:
    """Over every 10 tokens of the prefix in the tree a head keeps `kept`."""
    sums = np.zeros((1200, 1), dtype=np.float16)
    ids = np.arange(1000, 1000 + PREFIX)
    sums[ids, 0] = math.log(kept) / 10 * (np.arange(PREFIX) % 10 + 1)
    decays = Decays(sums)
    decays.given_out(ids)
    decays.arrived(decays.written(ids, np.arange(PREFIX) % 10, decays.owners(ids)))
    made = planner(max_residual=largest, **settings)
    made.bound = ResidualBound(decays, largest, made.config.max_tokens, 0)
    made.attach(made.cache)
    return made


def test_a_tail_grows_to_be_within_the_bound_and_the_answer_tells():
    p, req = bounded(0.2, kept=0.5), request(80, 5)
    (hit,) = p.plan_extend([req]).hits
    assert len(hit.rows) == 30 and hit.rows[-1] == 1079
    (admission,) = p.admissions
    assert admission.replayed == 30 and admission.residual == pytest.approx(0.125, rel=0.01)
    assert report(req)["tail_replay_residual"] == admission.residual
    assert "tail_replay_residual" not in report(hit_of(planner()))


def hit_of(p: Planner):
    req = request(80, 5)
    p.plan_extend([req])
    return req


def test_a_tail_that_is_longer_for_free_is_told_of_as_it_is():
    p = bounded(1.0, kept=0.5)
    p.rounded = lambda k: 40
    (hit,) = p.plan_extend([request(80, 5)]).hits
    assert len(hit.rows) == 40 and p.admissions[0].residual == pytest.approx(0.5**4, rel=0.01)


def test_a_match_ends_where_the_bound_is_kept():
    p = bounded(0.2, kept=0.5, max_tokens=30)
    tail = p.tail_length_of(request(80, 1))
    assert p.cache.within_bound(80, 80, 80, tail) == 80
    slow = bounded(0.1, kept=0.5, max_tokens=30)
    assert slow.cache.within_bound(80, 80, 80, tail) == 30  # all that may be replayed
    assert planner().cache.within_bound is None


def test_the_worst_replay_behind_an_answer_is_told():
    p, req = bounded(1.0, kept=0.5), request(80, 5)
    p.plan_extend([req])
    worst = report(req)["tail_replay_residual"]
    req.prefix_indices, req.last_node, req.mamba_needs_clear = range(4), 4, True  # retracted, and what is left is short
    p.cache.rows.release(req.tail_replay)
    p.plan_extend([req])
    assert p.admissions[-1].residual == 0 and report(req)["tail_replay_residual"] == worst > 0


def test_passes_are_told_whose_their_tokens_are():
    p = bounded(1.0)
    first, second = request(0, 3), request(40, 2)
    prefill = p.plan_extend([first, second]).tokens
    one, two = first.tail_replay.number, second.tail_replay.number
    assert one != two and not prefill.decode
    assert prefill.owners.tolist() == [one] * 3 + [two] * 2
    assert prefill.positions.tolist() == [0, 1, 2, 40, 41]
    for req in (first, second):
        req.kv_committed_len += 1
    step = p.plan_decode([second, first])
    assert step.tokens.owners.tolist() == [two, one] and step.tokens.decode
    assert step.tokens.positions.tolist() == [42, 3]
    mixed = mix(p.plan_extend([request(0, 1)]), step).tokens
    assert mixed.owners.tolist()[1:] == [two, one] and mixed.positions.tolist() == [0, 42, 3] and not mixed.decode
    assert planner().plan_extend([request(0, 3)]).tokens is None


def test_rows_that_are_given_out_tell_nothing_yet():
    p = bounded(1.0)
    decays = p.bound.decays
    decays.arrived(decays.written(np.arange(9), np.zeros(9, dtype=np.int64), decays.owners(np.arange(9))))
    assert decays.known(1)
    req = request(0, 3)
    p.plan_extend([req])
    assert not decays.known(1) and decays.known(4)
    req.kv_committed_len = 4
    p.plan_decode([req])
    assert not decays.known(3) and decays.known(4)
