"""Replay in graphs, with a recorder that runs the body again: what a CUDA graph does, as far as memory can tell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay.graphs import GraphedEngine, buckets, fastest
from sglang_tailreplay.replay.groups import find_groups
from sglang_tailreplay.replay.torch_layers import gdn_layers


def graphed(model, pool, max_tokens, skip_last_ffn):
    layers = gdn_layers(model, pool)
    groups = [(group, [layers[i] for i in group.layers]) for group in find_groups(model.config.layer_types)]
    engine = GraphedEngine(groups, max_tokens, skip_last_ffn, "cpu", 64, model.lm_head.weight.dtype)
    engine.capture(lambda body: body)
    for buffer in engine._buffers:
        buffer.fill_(float("nan"))  # what a launch does not fill must not reach a state
    return engine


@pytest.mark.parametrize(
    "layout, tails, skip",
    [
        ("qwen", [64], True),
        ("qwen", [1, 1], True),
        ("starts-with-FA", [70, 3, 40], True),
        ("ends-with-GDN", [200, 10, 150], True),
        ("ends-with-GDN", [70], False),
    ],
)
def test_graphs_rebuild_the_same_states(layout, tails, skip, make_model, prefill, replay, tokens, assert_close):
    model = make_model(layout)
    rows = prefill(model, tokens(220)).rows
    hits = [rows] * len(tails)
    expected, slots = replay(model, hits, tails, max_tokens=128, skip_last_ffn=skip)
    found, same_slots = replay(model, hits, tails, max_tokens=128, skip_last_ffn=skip, engine=graphed)
    assert slots == same_slots
    for i in found.conv:
        for slot in slots:
            assert_close(f"conv {i}", expected.conv[i][slot], found.conv[i][slot], 1e-5)
            assert_close(f"recurrent {i}", expected.recurrent[i][slot], found.recurrent[i][slot], 1e-5)
        others = [s for s in range(len(found.conv[i])) if s not in slots]
        assert found.conv[i][others].isnan().all(), "a slot of nobody was written"


def test_more_hits_than_segments_take_another_launch(make_model, prefill, replay, tokens, assert_close):
    model = make_model()
    rows = prefill(model, tokens(20)).rows
    tails = [1 + i % 3 for i in range(20)]
    expected, slots = replay(model, [rows] * 20, tails)
    found, _ = replay(model, [rows] * 20, tails, max_tokens=64, engine=graphed)
    for slot in slots:
        assert_close("recurrent", expected.recurrent[4][slot], found.recurrent[4][slot], 1e-5)


SIZES = buckets(4096)


def test_buckets_ascend_to_the_budget():
    assert SIZES[0] == 64 and SIZES[-1] == 4096 and list(SIZES) == sorted(set(SIZES))
    assert all(size % 64 == 0 for size in SIZES)
    assert buckets(100) == (64, 100)


def test_a_larger_bucket_is_taken_only_where_it_is_faster():
    choice = fastest({64: 1.0, 128: 0.99, 192: 0.9, 256: 0.95, 320: 2.0})
    assert choice == {64: 192, 128: 192, 192: 192, 256: 256, 320: 320}


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_the_choice_never_costs_time_or_rows_and_stands(times):
    milliseconds = {64 * (i + 1): time for i, time in enumerate(times)}
    choice = fastest(milliseconds)
    for size, chosen in choice.items():
        assert chosen >= size and milliseconds[chosen] <= milliseconds[size]
        assert choice[chosen] == chosen, "rounding a rounded tail must not change it"


def test_tails_are_rounded_to_the_buckets_that_were_faster():
    engine = GraphedEngine([], 256, True, "cpu", 4, torch.float32)
    ran = iter([3.0, 2.0, 1.0, 4.0])
    assert engine.tune(lambda body: (body(), next(ran))[1]) == {64: 3.0, 128: 2.0, 192: 1.0, 256: 4.0}
    assert [engine.rounded(tail) for tail in (1, 65, 192, 193, 300)] == [192, 192, 192, 256, 256 + 192]
    (launch,) = engine.plan([100])
    assert engine.bucket(launch.tokens) == 192, "a launch that was not rounded runs in the faster graph, too"


EMPTY = GraphedEngine([], 4096, True, "cpu", 4, torch.float32)


@given(st.integers(1, 20_000))
def test_rounding_takes_more_rows_never_fewer_and_less_than_a_step(tail):
    engine = EMPTY
    rounded = engine.rounded(tail)
    rest = tail % 4096
    assert 0 <= rounded - tail < (64 if rest <= 1024 else 128 if rest <= 2048 else 256)
    assert engine.rounded(rounded) == rounded
    assert len(engine.plan([rounded])) == len(engine.plan([tail]))
    for launch in engine.plan([rounded]):
        assert engine.bucket(launch.tokens) == launch.tokens, "a tail of that length leaves no token of a graph unused"
