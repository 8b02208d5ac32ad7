"""Operations and bytes of a hit, against numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from sglang_tailreplay.cost import Shape, Speeds, bound, covering_interval, pays_from
from sglang_tailreplay.memory_plan import parameters

SHAPES = Path(__file__).resolve().parents[1] / "scripts" / "shapes"
# Two groups: layers 0 and 1 before the first attention layer, 3 after it; the last attention layer has none.
TINY = {
    "hidden_size": 10,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 2,
    "linear_num_value_heads": 3,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
}


def test_operations_of_a_layer_by_hand():
    shape = Shape.from_config(TINY)
    # k: 10 x 2, v: 10 x 12, beta and decay: 10 x 6; convolution of 14 channels; state: 24 numbers, 5 operations each
    state = 2 * 10 * (2 + 12 + 6) + 2 * 4 * 14 + 5 * 24
    assert shape.state_flops() == state == 632
    # q: 10 x 2 and its 2 channels; gate and output: 10 x 12 each; read-out of the state; FFN: three matrices of 10 x 20
    assert shape.layer_flops() == state + 2 * 10 * 2 + 2 * 4 * 2 + 2 * 2 * 10 * 12 + 2 * 24 + 3 * 2 * 10 * 20 == 2416


def test_a_groups_last_layer_is_its_state_only_when_skipped():
    shape = Shape.from_config(TINY)
    assert shape.replay_flops(1, skip=True) == 2416 + 632 + 632
    assert shape.replay_flops(7, skip=False) == 7 * 3 * 2416


def test_operations_of_a_prefill_by_hand():
    shape = Shape.from_config(TINY)
    # two attention layers: q and output 10 x 10 each, k and v 10 x 5 each, FFN as above
    attention = 2 * 10 * (10 + 10 + 5 + 5) + 3 * 2 * 10 * 20
    assert shape.attention_flops() == attention
    per_token = 3 * 2416 + 2 * attention
    assert shape.prefill_flops(0, 1) == per_token + 2 * 4 * 2 * 5
    # tokens 2 and 3 see 3 and 4 tokens
    assert shape.prefill_flops(2, 4) == 2 * per_token + 2 * 4 * 2 * 5 * (3 + 4)
    gated = Shape.from_config(TINY | {"attn_output_gate": True})
    assert gated.attention_flops() == attention + 2 * 10 * 10


def test_bytes_by_hand():
    shape = Shape.from_config(TINY)
    assert shape.row_bytes(3) == 3 * 1 * 10 * 2  # group 0 has no rows
    assert shape.kv_bytes(7) == 7 * 2 * 2 * 1 * 5 * 2  # head_dim: 10 / 2


@pytest.mark.parametrize(
    ("name", "flops", "row", "kv"),
    [
        # Per group two whole layers of 229,507,072 and one state of 34,455,552, eight times
        ("qwen3.5-4b", 8 * (2 * 229_507_072 + 34_455_552), 35_840, 32_768),
        # Whole layer: q, k, v 104,857,600; beta and decay 983,040; gate and output 125,829,120; FFN 534,773,760;
        # convolution 81,920; state 3,932,160; read-out 1,572,864
        ("qwen3.6-27b", 16 * (2 * 772_030_464 + 88_866_816), 153_600, 65_536),
    ],
)
def test_costs_of_a_token_of_the_shapes(name, flops, row, kv):
    shape = Shape.from_config(json.loads((SHAPES / name / "config.json").read_text()))
    assert (shape.replay_flops(1), shape.row_bytes(1), shape.kv_bytes(1)) == (flops, row, kv)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 3}


def test_a_token_goes_through_its_experts_and_the_shared_one():
    shape = Shape.from_config(TINY | EXPERTS | {"shared_expert_intermediate_size": 5})
    assert (shape.ffn, shape.stored_ffn) == (2 * 3 + 5, 8 * 3 + 5)
    assert shape.layer_flops() == 2416 - 3 * 2 * 10 * (20 - 11)
    assert Shape.from_config(TINY | EXPERTS).ffn == 6


@pytest.mark.parametrize(
    "config",
    [
        TINY | EXPERTS | {"mlp_only_layers": [0]},
        TINY | EXPERTS | {"decoder_sparse_step": 2},
        TINY | {"num_experts": 8},
        {k: v for k, v in TINY.items() if k[0] != "i"},
    ],
)
def test_sizes_that_are_not_named_are_no_guess(config):
    with pytest.raises(KeyError):
        Shape.from_config(config)


def test_the_mixture_of_experts_shape_by_its_known_figures():
    shape = Shape.from_config(json.loads((SHAPES / "qwen3.5-35b-a3b" / "config.json").read_text()))
    assert (shape.kv_bytes(1), shape.row_bytes(1)) == (20480, 36864)
    assert 33e9 < parameters(shape, {"vocab_size": 248320}) < 36e9


def test_bound_takes_the_longer_of_replay_and_copies():
    shape, speeds = Shape.from_config(TINY), Speeds(tflops=1e-6, link_gbs=1e-3, origin="given")  # 1 MFLOP/s, 1 MB/s

    def limit(**more):
        return bound(
            shape, speeds, **{"matched": 100, "tail": 10, "skip": True, "from_host": True, **more}, suffix_ms=3
        )

    assert limit().replay_ms == pytest.approx(36.8)
    assert limit().copy_ms == pytest.approx((10 * 20 + 100 * 40) / 1e3)
    assert limit().ms == pytest.approx(36.8 + 3)
    assert limit(matched=1000).ms == pytest.approx(40.2 + 3)
    assert limit(matched=1000, from_host=False).copy_ms == pytest.approx(0.2)


@pytest.mark.parametrize(
    "tokens, budget, interval", [(1000, 1000, 128), (1024, 800, 128), (1025, 800, 192), (5, 100, 64), (0, 100, 0)]
)
def test_the_least_interval_that_a_budget_covers(tokens, budget, interval):
    """States of 100 bytes; intervals are multiples of 64."""
    assert covering_interval(tokens, 100, budget) == interval
    assert interval == 0 or tokens / interval <= budget // 100


def test_a_budget_without_a_place_covers_nothing():
    with pytest.raises(ValueError, match="99 bytes hold no state of 100"):
        covering_interval(1000, 100, 99)


def test_from_where_a_state_is_nearer_than_a_tail_is_long():
    assert pays_from(1024, 0.05) == 10_240  # 5 % of it are 512, half of the interval
