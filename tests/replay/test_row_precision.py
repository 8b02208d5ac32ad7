"""What rows of a byte per number do to replayed states, with and without an outlier channel, as trained models have."""

import copy
import math

import pytest
import torch

from sglang_tailreplay.cuda_streams.row_codec import make_codec
from sglang_tailreplay.replay.groups import EMBEDDING, find_groups

T, CHANNEL = 300, 5


def with_outlier(model, size):
    """The model reads a residual stream whose channel is `size` times the rest as if it were 1: its norms undo it."""
    model = copy.deepcopy(model)
    hidden = model.config.hidden_size
    rms = math.sqrt((hidden - 1 + size**2) / hidden)
    for layer in model.model.layers:
        factors = torch.full((hidden,), rms)
        factors[CHANNEL] = rms / size
        layer.input_layernorm.weight.data = factors - 1  # the module adds 1
    return model


def errors(model, replay, rows, kind):
    """Relative error of every layer's recurrent state, from packed rows against the same rows as they are."""
    states = []
    for codec in (None, make_codec(kind, model.config.hidden_size, torch.float32)):
        packed = {source: through(codec, h) for source, h in rows.items()}
        pool, (slot,) = replay(model, [packed], [T])
        states.append({layer: state[slot].clone() for layer, state in pool.recurrent.items()})
    exact, found = states
    return [((found[i] - exact[i]).norm() / exact[i].norm()).item() for i in exact]


def through(codec, h):
    if codec is None:
        return h.clone()
    out = torch.empty_like(h)
    codec.unpack(codec.pack(h), out)
    return out


def random_rows(model, size):
    generator = torch.Generator().manual_seed(3)
    rows = {}
    for group in find_groups(model.config.layer_types):
        h = torch.randn(T, model.config.hidden_size, generator=generator)
        if group.source != EMBEDDING:
            if size > 1:
                h[:, CHANNEL] = size * (1 + 0.1 * h[:, CHANNEL])  # large in every token
            rows[group.source] = h
    return rows


@pytest.mark.parametrize(
    "kind, size, least, most",
    [("int8", 1, 0, 0.02), ("fp8", 1, 0, 0.06), ("int8", 300, 0.5, math.inf), ("fp8", 300, 0, 0.07)],
)
def test_states_from_packed_rows(make_model, replay, kind, size, least, most):
    model = with_outlier(make_model("starts-with-FA"), size)
    found = errors(model, replay, random_rows(model, size), kind)
    assert least <= max(found) <= most
