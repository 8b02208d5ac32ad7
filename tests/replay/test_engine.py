"""The engine against transformers' own prefill and against the naive replay, on models that remember."""

from dataclasses import replace

import pytest
import torch

from sglang_tailreplay.replay import naive
from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.groups import find_groups
from sglang_tailreplay.replay.torch_layers import StatePool, gdn_layers, gdn_weights, replay_engine

LAYOUTS = ["qwen", "starts-with-FA", "ends-with-GDN", "consecutive-FA"]
EXACT = 1e-5  # float32, relative to the largest value. Measured: 1.7e-6; only the order of sums differs


def gdn_indices(model):
    return [i for group in find_groups(model.config.layer_types) for i in group.layers]


def tail_of(rows, k):
    return {source: row[len(row) - k :] for source, row in rows.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tail_gives_the_state_of_a_prefill(layout, make_model, prefill, replay, tokens, assert_close):
    model = make_model(layout)
    truth = prefill(model, tokens(150))
    pool, (slot,) = replay(model, [truth.rows], [150])
    for i in gdn_indices(model):
        assert_close(f"conv of layer {i}", truth.conv[i], pool.conv[i][slot], EXACT)
        assert_close(f"recurrent of layer {i}", truth.recurrent[i], pool.recurrent[i][slot], EXACT)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_boundaries_below_the_conv_width(m, make_model, prefill, replay, tokens, assert_close):
    model = make_model()
    truth = prefill(model, tokens(m))
    pool, (slot,) = replay(model, [truth.rows], [m])
    for i in gdn_indices(model):
        assert_close(f"conv of layer {i}", truth.conv[i], pool.conv[i][slot], EXACT)
        assert_close(f"recurrent of layer {i}", truth.recurrent[i], pool.recurrent[i][slot], EXACT)


@pytest.mark.parametrize("k", [1, 3, 4, 63, 64, 65, 500])
def test_tails_equal_the_naive_replay(k, make_model, prefill, replay, tokens, assert_close):
    model = make_model()
    truth = prefill(model, tokens(520))
    with torch.no_grad():
        groups = find_groups(model.config.layer_types)
        expected = naive.replay_states(groups, gdn_weights(model), tail_of(truth.rows, k))
    pool, (slot,) = replay(model, [truth.rows], [k])
    for i in gdn_indices(model):
        assert_close(f"conv of layer {i}", expected[i].conv, pool.conv[i][slot], EXACT)
        assert_close(f"recurrent of layer {i}", expected[i].recurrent, pool.recurrent[i][slot], EXACT)


def test_short_tail_is_an_approximation_and_a_longer_one_is_better(make_model, prefill, replay, tokens):
    model = make_model()
    truth = prefill(model, tokens(400))
    errors = []
    for k in (20, 100, 400):
        pool, (slot,) = replay(model, [truth.rows], [k])
        i = gdn_indices(model)[0]
        errors.append((pool.recurrent[i][slot] - truth.recurrent[i]).norm() / truth.recurrent[i].norm())
    assert 1 > errors[0] > errors[1] > 0.01 and errors[2] < EXACT, errors


def test_only_the_slots_of_the_hits_are_written(make_model, prefill, replay, tokens):
    model = make_model()
    rows = prefill(model, tokens(30)).rows
    pool, slots = replay(model, [rows, rows], [30, 10])
    others = [i for i in range(8) if i not in slots]
    for i in gdn_indices(model):
        assert pool.conv[i][others].isnan().all() and pool.recurrent[i][others].isnan().all()


def boom(*args):
    raise AssertionError("a skipped module was called")


def engine_with_raising_last(model, pool, max_tokens, skip_last_ffn):
    layers = gdn_layers(model, pool)
    groups = find_groups(model.config.layer_types)
    for group in groups:
        last = group.layers[-1]
        layers[last] = replace(layers[last], mix=boom, post_norm=boom, ffn=boom)
    return ReplayEngine([(g, [layers[i] for i in g.layers]) for g in groups], max_tokens, skip_last_ffn)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_only_changes_nothing(layout, make_model, prefill, replay, tokens):
    model = make_model(layout)
    rows = prefill(model, tokens(70)).rows
    whole, (slot,) = replay(model, [rows], [70], skip_last_ffn=False)
    state_only, _ = replay(model, [rows], [70], engine=engine_with_raising_last)
    for i in gdn_indices(model):
        assert torch.equal(whole.conv[i][slot], state_only.conv[i][slot])
        assert torch.equal(whole.recurrent[i][slot], state_only.recurrent[i][slot])
    with pytest.raises(AssertionError, match="skipped module"):
        replay(model, [rows], [70], skip_last_ffn=False, engine=engine_with_raising_last)


@pytest.mark.parametrize("budget", [10_000, 200, 64], ids=["one-launch", "two-launches", "cut"])
def test_hits_together_equal_one_by_one(budget, make_model, prefill, replay, tokens, assert_close):
    model = make_model()
    lengths = [90, 3, 150, 1, 64]
    tails = [70, 3, 150, 1, 40]
    hits = [prefill(model, tokens(n, seed=n)).rows for n in lengths]
    pool, slots = replay(model, hits, tails, max_tokens=budget)
    for hit, slot in enumerate(slots):
        alone, (alone_slot,) = replay(model, [hits[hit]], [tails[hit]])
        for i in gdn_indices(model):
            assert_close(f"conv {hit} {i}", alone.conv[i][alone_slot], pool.conv[i][slot], EXACT)
            assert_close(f"recurrent {hit} {i}", alone.recurrent[i][alone_slot], pool.recurrent[i][slot], EXACT)


# Pieces of 2 tokens are shorter than the convolution's window.
PIECES = [(64, 63), (64, 64), (64, 65), (64, 129), (64, 300), (2, 7), (2, 20)]
MORE_PIECES = [pytest.param(2, k, marks=pytest.mark.slow) for k in (63, 64, 65, 129, 300)]


@pytest.mark.parametrize("budget, k", [*PIECES, *MORE_PIECES])
def test_cut_tails_equal_whole_ones(k, budget, make_model, prefill, replay, tokens, assert_close):
    model = make_model("ends-with-GDN")
    rows = prefill(model, tokens(300)).rows
    whole, (slot,) = replay(model, [rows], [k])
    cut, _ = replay(model, [rows], [k], max_tokens=budget)
    for i in gdn_indices(model):
        assert_close(f"conv of layer {i}", whole.conv[i][slot], cut.conv[i][slot], EXACT)
        assert_close(f"recurrent of layer {i}", whole.recurrent[i][slot], cut.recurrent[i][slot], EXACT)


def test_replay_is_deterministic(make_model, prefill, replay, tokens):
    model = make_model()
    rows = prefill(model, tokens(100)).rows
    first, (slot,) = replay(model, [rows], [80], max_tokens=64)
    second, _ = replay(model, [rows], [80], max_tokens=64)
    for i in gdn_indices(model):
        assert torch.equal(first.recurrent[i][slot], second.recurrent[i][slot])


@pytest.mark.parametrize("n", [4, 65, 300])
def test_bf16_is_as_good_as_a_bf16_prefill(n, make_model, prefill, replay, tokens):
    """At ratio 1 in bfloat16: at most twice the error that transformers' own bfloat16 prefill has against float32."""
    full, half = make_model(), make_model(dtype=torch.bfloat16)
    truth, reference = prefill(full, tokens(n)), prefill(half, tokens(n))
    pool, (slot,) = replay(half, [reference.rows], [n])
    for i in gdn_indices(full):
        for name, exact, ref, ours in (
            ("conv", truth.conv[i], reference.conv[i], pool.conv[i][slot]),
            ("recurrent", truth.recurrent[i], reference.recurrent[i], pool.recurrent[i][slot]),
        ):
            allowed = 2 * (ref.float() - exact).norm()
            assert (ours.float() - exact).norm() <= allowed, (name, i, (ours.float() - exact).norm(), allowed)


def test_runs_in_inference_mode(make_model, prefill, replay, tokens, assert_close):
    model = make_model()
    truth = prefill(model, tokens(20))
    with torch.inference_mode():
        pool, (slot,) = replay(model, [truth.rows], [20])
    assert_close("recurrent", truth.recurrent[0], pool.recurrent[0][slot], EXACT)


def test_inputs_are_asked_for_launch_by_launch_and_group_by_group(make_model):
    model = make_model("ends-with-GDN")
    pool = StatePool.create(model, slots=2)
    pool.clear_recurrent(torch.arange(2))
    asked = []

    def inputs(number, launch):
        asked.append((number, [piece[:3] for piece in launch.pieces]))
        return torch.zeros(launch.tokens, 64)

    engine = replay_engine(model, pool, max_tokens=8)
    launches = engine.plan([10, 4])
    engine.run(launches, torch.tensor([1, 0], dtype=torch.int32), inputs)
    first, second = [(0, 0, 8)], [(0, 8, 10), (1, 0, 4)]
    assert asked == [(0, first), (1, first), (2, first), (0, second), (1, second), (2, second)]
    assert [launch.tokens for launch in launches] == [8, 6]


def test_misuse_is_refused(make_model):
    model = make_model()
    pool = StatePool.create(model, slots=2)
    layers = gdn_layers(model, pool)
    group, *_ = find_groups(model.config.layer_types)
    with pytest.raises(ValueError, match="max_tokens"):
        replay_engine(model, pool, max_tokens=0)
    with pytest.raises(ValueError, match="GDN layers"):
        ReplayEngine([(group, [layers[0], layers[2]])], 64)
    with pytest.raises(ValueError, match="one slot per tail"):
        engine = replay_engine(model, pool, 64)
        engine.run(engine.plan([3, 4]), torch.zeros(1, dtype=torch.int32), None)
