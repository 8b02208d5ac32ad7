"""Sums of log-gates from the inputs of the gates: against the reference, and not read before they are there."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.recording import RecordingLanes
from sglang_tailreplay.decay_store import DecayStore, cut, decay_bytes, decay_width, run_sums
from sglang_tailreplay.radix.decays import LEAST, ROUNDING, RUN
from sglang_tailreplay.radix.rows import NO_ROW
from sglang_tailreplay.replay import naive
from sglang_tailreplay.step import Tokens, join

LAYERS, HEADS = 2, 3
D = LAYERS * HEADS


def layers(seed=0):
    """Heads that forget at very different speeds: decays of 1e-6 to 100 at a token."""
    made = torch.Generator().manual_seed(seed)
    return [
        SimpleNamespace(A_log=torch.randn(HEADS, generator=made) * 4 - 2, dt_bias=torch.randn(HEADS, generator=made))
        for _ in range(LAYERS)
    ]


def gate_inputs(tokens: int, seed=0) -> torch.Tensor:
    return torch.randn(tokens, LAYERS, HEADS, generator=torch.Generator().manual_seed(seed)) * 3


def log_gates(a, modules) -> np.ndarray:
    """[T, D] by the reference."""
    parts = [naive.gates(a[:, i], a[:, i], m.A_log, m.dt_bias)[0] for i, m in enumerate(modules)]
    return torch.cat(parts, dim=1).double().numpy()


def prefill(*parts: tuple[int, int, int]) -> Tokens:
    """Parts: owner, first position, tokens."""
    owners = np.concatenate([np.full(n, owner) for owner, _, n in parts])
    return Tokens(owners, np.concatenate([np.arange(begin, begin + n) for _, begin, n in parts]))


def decode(*pairs: tuple[int, int]) -> Tokens:
    owners, positions = np.array(pairs).T
    return Tokens(owners, positions, decode=True)


def members(tokens: Tokens) -> list[list[int]]:
    """Runs as lists of tokens, after a look at the steps."""
    found = cut(tokens)
    T = len(tokens.owners)
    runs = [[i for i in run if i < T] for run in found.members.tolist()]
    assert sorted(sum(runs, [])) == list(range(T))
    for run in runs:
        assert found.steps[run].tolist() == list(range(len(run))), "padding belongs behind a run"
    return runs


def test_a_prefill_is_cut_into_runs_from_where_each_part_begins():
    assert [len(run) for run in members(prefill((3, 10, 130), (1, 0, 64), (2, 5, 1)))] == [64, 1, 64, 64, 2]


def test_steps_of_decode_make_runs_by_request():
    steps = [decode((7, 20), (5, 9)), decode((5, 10), (7, 21)), decode((7, 22), (8, 0))]
    assert members(join(*steps)) == [[1, 2], [0, 3, 4], [5]]


def test_a_request_that_starts_over_begins_a_new_run():
    assert members(decode((1, 5), (1, 6), (1, 3), (1, 4))) == [[0, 1], [2, 3]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 150)), max_size=8))
def test_runs_are_of_one_request_and_have_no_gap(parts):
    tokens = prefill(*parts) if parts else Tokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    for run in members(tokens):
        assert 0 < len(run) <= RUN and len(set(tokens.owners[run])) == 1
        assert (np.diff(tokens.positions[run]) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_reference_rounded_towards_zero(dtype):
    tokens, modules = prefill((0, 0, 200), (1, 3, 70)), layers()
    a = gate_inputs(270).to(dtype)
    runs = cut(tokens)
    decay = -torch.cat([m.A_log for m in modules]).exp()
    bias = torch.cat([m.dt_bias for m in modules])
    got = run_sums(a.flatten(1), decay, bias, torch.from_numpy(runs.members))[:-1]
    assert got.shape == (270, decay_width(D)) and (got[:, D:] == 0).all()
    got, g = got[:, :D].double().numpy(), log_gates(a, modules)
    for run in members(tokens):
        exact = g[run].cumsum(0)
        assert (got[run] >= exact - 1e-12).all(), "a head would seem to forget more than it does"
        kept = exact > -6e4
        assert (got[run] <= exact * (1 - ROUNDING) + LEAST)[kept].all(), "more was rounded than `Decays` allows for"
        assert (got[run][~kept] == -6e4).all()


def test_a_gate_that_is_no_number_decays_nothing():
    a = torch.full((2, D), float("nan"))
    sums = run_sums(a, -torch.ones(D), torch.zeros(D), torch.tensor([[0, 1]]))
    assert (sums == 0).all()


def test_sums_may_be_read_once_they_have_arrived():
    lanes, modules = RecordingLanes(), layers()
    store = DecayStore(300, LAYERS, HEADS, lanes, torch.device("cpu"))
    a, tokens = gate_inputs(100), prefill((0, 0, 100))
    lanes.forward.writes(a)
    ids = np.arange(50, 150)
    store.decays.given_out(ids)
    store.write_out(a, ids, tokens, store.decays.owners(ids), modules)
    store.look()
    assert store.decays.log_kept(ids, 100) == 0, "nobody has waited for the copy"
    store._on_their_way[0][1].synchronize()
    store.look()
    lanes.host.reads(store._rows)
    expected = log_gates(a, modules).sum(0).max()
    assert store.decays.log_kept(ids, 100) == pytest.approx(expected, rel=ROUNDING, abs=2 * LEAST)
    store.decays.check_invariants()


def test_a_token_without_a_row_is_summed_up_but_not_written():
    store = DecayStore(10, LAYERS, HEADS, Lanes.create("cpu"), torch.device("cpu"))
    a, modules = gate_inputs(3), layers()
    ids = np.array([4, NO_ROW, 2])
    store.decays.given_out(ids)
    store.write_out(a, ids, prefill((0, 0, 3)), store.decays.owners(ids), modules)
    store.look()
    expected = log_gates(a, modules).sum(0).max()
    assert store.decays.log_kept(ids, 3) == pytest.approx(expected, rel=ROUNDING, abs=2 * LEAST)
    assert np.isnan(store.decays._sums[[0, 1, 3, 5]]).all()


def test_bytes_of_a_token():
    assert decay_bytes(32, 24) == 1536 and decay_bytes(48, 48) == 4608  # the 4B and the 27B shape
    assert decay_bytes(3, 2) == 16  # whole vectors of the copy kernel


@pytest.mark.gpu
def test_a_gpu_makes_the_same_sums_and_its_host_reads_them_in_time():
    device = torch.device("cuda")
    store = DecayStore(5000, LAYERS, HEADS, Lanes.create(device), device)
    modules = layers()
    for module in modules:
        module.A_log, module.dt_bias = module.A_log.to(device), module.dt_bias.to(device)
    tokens, a = prefill((0, 0, 3000), (1, 7, 65)), gate_inputs(3065)
    ids = np.random.default_rng(0).permutation(5000)[:3065]
    store.decays.given_out(ids)
    store.write_out(a.to(device), ids, tokens, store.decays.owners(ids), modules)
    torch.cuda.synchronize()
    store.look()
    for part in (slice(0, 3000), slice(3000, 3065)):
        expected = log_gates(a[part], layers()).sum(0).max()
        assert store.decays.log_kept(ids[part], part.stop - part.start) == pytest.approx(expected, rel=2 * ROUNDING)
    store.decays.check_invariants()
