"""Errors of replayed states, in torch: against token-by-token states, and against the gates' bound."""

import json

import pytest
import state_errors
import torch
from train import shapes
from train.delta_rule import with_states
from train.gates import spread_half_lives
from train.model import Hybrid
from train.states import errors, run

TAILS = (64, 128)


@pytest.fixture(scope="module")
def model():
    """Its heads keep half of what they hold for 50 to 400 tokens."""
    made = Hybrid(shapes.config(shapes.RECIPES["toy"]), seed=3).eval()
    for layer in made.recurrent:
        spread_half_lives(layer, 50, 400, torch.Generator().manual_seed(3))
    return made


def test_states_are_there_before_every_chunk_and_after_the_last_one():
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 192, 2, 8, generator=draw)
    g, beta = -0.1 * torch.rand(2, 1, 192, 2, generator=draw).abs()
    _, states = with_states(q, k, v, g, -beta)
    assert states.shape == (1, 2, 4, 8, 8) and not states[:, :, 0].any()
    for chunks in (1, 2, 3):
        _, shorter = with_states(*(x[:, : 64 * chunks] for x in (q, k, v, g, -beta)))
        torch.testing.assert_close(states[:, :, chunks], shorter[:, :, -1])


@torch.no_grad()
def test_what_a_replay_misses_is_bounded_where_its_inputs_are_exact(model):
    ids = torch.randint(3, 400, (2, 256), generator=torch.Generator().manual_seed(1))
    found = list(errors(model, ids, TAILS))
    assert [(one.layer, one.place, one.tail) for one in found] == [(n, n, tail) for n in (0, 1) for tail in TAILS]
    for one in found:
        if one.place == 0:
            assert (one.recurrent <= 1.001 * one.bound + 1e-5).all() and not one.conv.any()
        else:
            assert one.conv.max() > 0  # it has read what an approximate layer wrote
    assert all((a.recurrent >= b.recurrent - 1e-6).all() for a, b in zip(found[::2], found[1::2], strict=True))
    assert (found[0].recurrent > 1e-3).any()  # or nothing was tested


@torch.no_grad()
def test_a_replay_of_everything_gives_the_states_of_full_prefill(model):
    """The same code with the whole prefix as its tail."""
    x = model.embed(torch.randint(3, 400, (1, 128), generator=torch.Generator().manual_seed(2)))
    block = model.model.layers[0]
    torch.testing.assert_close(run(block, x).out, block(x))


@pytest.mark.parametrize(("length", "tails"), [(100, (64,)), (128, (100,)), (128, (128,)), (128, (0,))])
def test_prefix_and_tails_are_whole_chunks(model, length, tails):
    with pytest.raises(ValueError, match="multiples of 64"):
        list(errors(model, torch.zeros(1, length, dtype=torch.long), tails))


def test_the_script_writes_numbers_and_a_picture(model, tmp_path):
    from train import checkpoint

    checkpoint.write(model, tmp_path / "toy")
    given = ["--length", "256", "--tails", "64,128", "--count", "1", "--out", str(tmp_path / "out")]
    assert state_errors.main(["--model-path", str(tmp_path / "toy"), *given]) == 0
    report = json.loads((tmp_path / "out" / "states.json").read_text())
    assert [(row["layer"], row["tail"]) for row in report["layers"]] == [(0, 64), (0, 128), (1, 64), (1, 128)]
    assert report["prompts"] == 3 and report["tokens"] == 192 and (tmp_path / "out" / "states.png").exists()
    with pytest.raises(SystemExit):
        state_errors.parse(["--model-path", "m", "--tails", "65"])
