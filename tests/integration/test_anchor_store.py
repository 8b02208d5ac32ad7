"""States to the host and back, on lanes that record every access.

A run without a RaceError stands for every interleaving.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_tailreplay.anchor_codec import LOSS
from sglang_tailreplay.anchor_store import GIB, AnchorStore, anchor_bytes, choose_anchors
from sglang_tailreplay.cuda_streams.recording import RaceError, RecordingLanes
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.replayer import Replayer, slots_of
from sglang_tailreplay.step import Hit, Take

LAYERS, SLOTS, PLACES = 3, 6, 4


class Machine:
    def __init__(self):
        self.lanes = RecordingLanes()
        generator = torch.Generator().manual_seed(0)
        conv = torch.randn(LAYERS, SLOTS, 8, 3, generator=generator).to(torch.bfloat16)
        temporal = torch.randn(LAYERS, SLOTS, 2, 4, 4, generator=generator)
        self.pool = SimpleNamespace(mamba_cache=SimpleNamespace(conv=[conv], temporal=temporal))
        self.parts = (conv, temporal)
        self.store = AnchorStore(self.pool, PLACES, self.lanes)

    def take(self, *pairs):
        self.store.take([Take(torch.tensor(slot), place) for slot, place in pairs])

    def change(self):
        """The next pass writes every state."""
        self.lanes.forward.writes(*self.parts)
        for part in self.parts:
            part += 1

    def restore(self, places, slots):
        fetched = self.store.fetch(places)
        with self.lanes.replay.after(self.lanes.mark_current("slots cleared")):
            self.store.restore(fetched, torch.tensor(slots, dtype=torch.int32))
            restored = self.lanes.replay.record("states replayed")
        self.lanes.current_waits(restored)


@pytest.fixture
def machine():
    return Machine()


def test_a_state_comes_back_as_it_was_when_it_was_taken(machine):
    before = [part.clone() for part in machine.parts]
    machine.take((4, 2), (1, 0))
    machine.change()
    machine.restore([0, 2], [5, 3])
    for part, old in zip(machine.parts, before, strict=True):
        assert torch.equal(part[:, 5], old[:, 1]) and torch.equal(part[:, 3], old[:, 4])
        others = [0, 1, 2, 4]
        assert torch.equal(part[:, others], old[:, others] + 1), "a slot of nobody was written"
    machine.lanes.forward.reads(*machine.parts)


def test_a_place_that_is_taken_again_has_the_new_state(machine):
    machine.take((1, 0))
    machine.change()
    expected = [part[:, 2].clone() for part in machine.parts]
    machine.take((2, 0))
    machine.restore([0], [4])
    assert all(torch.equal(part[:, 4], old) for part, old in zip(machine.parts, expected, strict=True))


@pytest.mark.parametrize("forgotten", ["states gathered", "states fetched", "slots cleared"])
def test_a_forgotten_wait_is_a_race(machine, forgotten, monkeypatch):
    join = machine.lanes.join
    skip = lambda lane, event: None if event.name == forgotten else join(lane, event)  # noqa: E731
    monkeypatch.setattr(machine.lanes, "join", skip)
    contiguous = torch.Tensor.contiguous

    def marked(tensor):
        made = contiguous(tensor)
        machine.lanes.current.writes(made)
        return made

    monkeypatch.setattr(torch.Tensor, "contiguous", marked)
    machine.lanes.forward.writes(*machine.parts)
    with pytest.raises(RaceError):
        machine.take((1, 0))
        machine.change()
        machine.restore([0], [4])


def test_a_state_saved_layer_by_layer_is_whole_when_its_last_layer_was_sent(machine):
    states = [torch.randn(2, LAYERS, *part.shape[2:]).to(part.dtype) for part in machine.parts]
    machine.take((1, 3))
    machine.store.forget(3)
    machine.store.forget(0)
    for layer in range(LAYERS):
        assert not machine.store.whole(3) and not machine.store.whole(0)
        with pytest.raises(AssertionError, match="not whole"):
            machine.store.fetch([3])
        parts = [part[:, layer].float() for part in states]
        machine.lanes.forward.writes(*parts)
        machine.store.keep(layer, parts, [3, 0])
    assert machine.store.whole(3) and machine.store.whole(0)
    machine.lanes.forward.writes(*machine.parts)
    machine.restore([0, 3], [5, 2])
    for part, saved in zip(machine.parts, states, strict=True):
        assert torch.equal(part[:, 5], saved[1]) and torch.equal(part[:, 2], saved[0])


def test_a_place_without_a_state_is_not_whole(machine):
    assert not machine.store.whole(1)
    machine.take((2, 1))
    assert machine.store.whole(1) and not machine.store.whole(0)


def test_a_state_to_be_saved_next_is_that_of_its_slot_before_the_pass(machine):
    before = [part.clone() for part in machine.parts]
    machine.store.take_next(Take(torch.tensor(4), 2))
    assert machine.store.whole(2), "what is fetched for the next pass is fetched after it"
    machine.store.pass_begins()
    machine.change()
    machine.store.pass_begins()
    machine.restore([2], [5])
    assert all(torch.equal(part[:, 5], old[:, 4]) for part, old in zip(machine.parts, before, strict=True))


def test_the_number_of_a_slot_is_kept_until_the_stream_that_reads_it_has(machine, monkeypatch):
    """It may be the last reference: the request has ended, and its memory is the scheduler's stream's to reuse."""
    kept = []
    monkeypatch.setattr(machine.lanes.forward, "reads", lambda *tensors: kept.extend(tensors))
    slots = [torch.tensor(4), torch.tensor(1)]
    machine.store.take_next(Take(slots[0], 2))
    machine.store.pass_begins()
    machine.store.take([Take(slots[1], 0)])
    assert [any(tensor is slot for tensor in kept) for slot in slots] == [True, True]


def test_a_place_that_was_given_to_another_state_does_not_get_the_one_before(machine):
    """A finished request's anchor was evicted before the next pass, and the pass saves another state in its place."""
    machine.store.take_next(Take(torch.tensor(4), 2))
    machine.store.forget(2)
    machine.store.pass_begins()
    assert not machine.store.whole(2)
    for layer in range(LAYERS):
        machine.store.keep(layer, [part[:1, layer] for part in (p.transpose(0, 1) for p in machine.parts)], [2])
    assert machine.store.whole(2)


class Engine:
    """Notes what it is asked to replay."""

    groups = ()

    def __init__(self):
        self.ran = []

    def plan(self, tails, seeded):
        self.planned = (list(tails), list(seeded))
        return (object(),) if tails else ()

    def run(self, launches, slots, inputs):
        self.ran.append(slots.tolist())


class Gate:
    opened = 0

    def open(self, lane):
        assert lane.name == "replay"
        self.opened += 1


class Watch:
    def measure(self, stage):
        return contextlib.nullcontext()


@pytest.fixture
def replayer(machine, monkeypatch):
    monkeypatch.setattr("sglang_tailreplay.replayer._Inputs", lambda *args: SimpleNamespace(close=lambda: None))
    made = Replayer(Engine(), None, None, machine.lanes, Watch(), anchors=machine.store)
    made.gates = [Gate(), Gate()]
    return made


def hit(slot, rows, anchor=None):
    return Hit(f"r{slot}", torch.tensor(slot), np.arange(rows), np.arange(rows), anchor)


def run(replayer, hits):
    slots = slots_of(hits)
    replayer.lanes.forward.writes(slots, *replayer.anchors._pool)
    replayer.run(hits, slots)
    replayer.wait()


def test_tails_continue_the_states_that_were_restored(machine, replayer):
    before = [part.clone() for part in machine.parts]
    machine.take((1, 3))
    run(replayer, [hit(4, 5), hit(2, 7, anchor=3), hit(5, 0, anchor=3)])
    assert replayer.engine.planned == ([5, 7], [False, True])
    assert replayer.engine.ran == [[4, 2]], "a hit without a tail is not replayed"
    for part, old in zip(machine.parts, before, strict=True):
        assert torch.equal(part[:, 2], old[:, 1]) and torch.equal(part[:, 5], old[:, 1])
        assert torch.equal(part[:, 4], old[:, 4])


def test_without_any_tail_the_gates_open_when_the_states_are_there(machine, replayer):
    machine.take((1, 0))
    run(replayer, [hit(4, 0, anchor=0)])
    assert not replayer.engine.ran
    assert [gate.opened for gate in replayer.gates] == [1, 1]


def test_state_bytes_count_every_layer_and_part(machine):
    window = 8 * 3 * 2
    assert anchor_bytes(machine.parts, "fp32") == LAYERS * (window + 2 * 4 * 4 * 4)
    assert anchor_bytes(machine.parts, "bf16") == LAYERS * (window + 2 * 4 * 4 * 2)
    assert anchor_bytes(machine.parts, "int8") == LAYERS * (window + 2 * 4 * 4 + 2 * 4 * 4)
    for dtype in ("fp32", "bf16", "int8"):
        store = AnchorStore(machine.pool, PLACES, machine.lanes, dtype)
        assert sum(host[0].nbytes for host in store._host) == anchor_bytes(machine.parts, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_state_kept_with_fewer_bits_is_off_by_no_more_than_is_said(machine, dtype):
    machine.store = AnchorStore(machine.pool, PLACES, machine.lanes, dtype)
    conv, temporal = (part.clone() for part in machine.parts)
    machine.take((4, 2))
    for layer in range(LAYERS):
        machine.store.keep(layer, [conv[layer, [1]], temporal[layer, [1]]], [0])
    machine.change()
    machine.restore([2, 0], [5, 3])
    for slot, source in ((5, 4), (3, 1)):
        assert torch.equal(machine.parts[0][:, slot], conv[:, source]), "windows are small and kept as they are"
        error = (machine.parts[1][:, slot] - temporal[:, source]).norm() / temporal[:, source].norm()
        assert 0 < error <= LOSS[dtype]


def test_the_store_holds_one_state_per_interval_within_its_budget():
    assert choose_anchors(100, 1000, 64, 1 << 40, None) == 16
    assert choose_anchors(GIB, 10**9, 64, 80 * GIB, None) == 10
    assert choose_anchors(GIB, 10**9, 64, 80 * GIB, 3.5) == 3


@pytest.mark.parametrize("free, asked, why", [(4 * GIB, None, "no room"), (4 * GIB, 9, "does not fit")])
def test_a_store_that_cannot_be_is_refused(free, asked, why):
    with pytest.raises(TailReplayError, match=why) as error:
        choose_anchors(GIB, 10**9, 64, free, asked)
    assert "--tail-replay-anchor" in str(error.value)


def test_a_large_store_is_not_sliced(monkeypatch):
    """States are copied by the driver, which refuses to cross from one registered slice to the next."""
    asked = []

    def record(shape, dtype, copied=False):
        asked.append(copied)
        return SimpleNamespace(tensor=torch.empty(shape, dtype=dtype))

    monkeypatch.setattr("sglang_tailreplay.anchor_store.pinned_empty", record)
    Machine()
    assert asked == [True, True]
