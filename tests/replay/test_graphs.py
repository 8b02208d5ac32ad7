"""Replay in graphs, with a recorder that runs the body again: what a CUDA graph does, as far as memory can tell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay.graphs import GraphedEngine, buckets
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
