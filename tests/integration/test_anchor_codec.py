"""What each way of keeping a state loses, against the bound that its arithmetic gives, and what it costs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.anchor_codec import LOSS, decode, encode, stored
from sglang_tailreplay.config import ANCHOR_DTYPES

HV, V, K = 4, 16, 8


def state(seed=0, dtype=torch.float32):
    """Heads and key channels of very different size, one of each empty."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, HV, V, K, generator=generator)
    made *= 10 ** torch.linspace(-6, 3, HV)[:, None, None] * 10 ** torch.linspace(-2, 2, K)
    made[:, 1], made[..., 2] = 0, 0
    return made.to(dtype)


def through(name, given):
    return decode(name, encode(name, given, given.dtype), given.dtype)


@pytest.mark.parametrize("name", ANCHOR_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_encoded_has_the_shapes_that_room_is_made_for(name, dtype):
    parts = encode(name, state(dtype=dtype), dtype)
    room = stored(name, (3, HV, V, K), dtype)
    assert [(tuple(part.shape), part.dtype) for part in parts] == [(kept.shape, kept.dtype) for kept in room]
    assert through(name, state(dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp32_loses_nothing_of_the_pool(dtype):
    assert torch.equal(through("fp32", state(dtype=dtype)), state(dtype=dtype))


@given(st.integers(0, 1000))
def test_bf16_rounds_each_number(seed):
    exact = state(seed)
    assert ((through("bf16", exact) - exact).abs() <= exact.abs() * 2**-8).all()
    assert torch.equal(through("bf16", exact.bfloat16()), exact.bfloat16())


@given(st.integers(0, 1000))
def test_int8_is_within_half_a_step_of_every_channel(seed):
    exact = state(seed)
    half = exact.abs().amax(-2, keepdim=True) / 127 / 2
    error = (through("int8", exact) - exact).abs()
    assert (error <= half * (1 + 1e-5)).all(), "small heads and channels must not suffer from large ones"
    assert not through("int8", exact)[:, 1].any() and torch.isfinite(through("int8", exact)).all()


@pytest.mark.parametrize("name, most", [("fp32", 0.0), ("bf16", 0.003), ("int8", 0.008)])
def test_the_error_of_a_state_of_ordinary_numbers(name, most):
    """Relative Frobenius error of a state like those of a model: bounds with room over what is measured here."""
    exact = torch.randn(32, 128, 128, generator=torch.Generator().manual_seed(1))
    error = float((through(name, exact) - exact).norm() / exact.norm())
    assert error <= most
    assert not most or error > most / 4, "the bound says nothing"


@pytest.mark.parametrize("name", ANCHOR_DTYPES)
def test_no_state_is_off_by_more_than_is_said(name):
    """The worst for int8: one large number per channel, all others half a step of it."""
    worst = torch.full((2, 128, 8), 0.4999 / 127)
    worst[:, 5] = 1
    ordinary = torch.randn(2, 128, 8, generator=torch.Generator().manual_seed(2))
    for exact in (worst, ordinary):
        assert (through(name, exact) - exact).norm() <= LOSS[name] * exact.norm()
    if name == "int8":
        assert (through(name, worst) - worst).norm() > LOSS[name] / 2 * worst.norm(), "the bound says nothing"


@pytest.mark.parametrize("name, expected", [("fp32", 4.0), ("bf16", 2.0), ("int8", 1 + 4 / 128)])
def test_bytes_per_number(name, expected):
    assert sum(part.bytes for part in stored(name, (32, 128, 128), torch.float32)) == expected * 32 * 128 * 128
