"""What a forward pass hands on of its gates, and that a pass that hands over too little is an error."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_tailreplay.capture import STEPS_TOGETHER
from sglang_tailreplay.gate_capture import GateCapture
from sglang_tailreplay.radix.rows import NO_ROW
from sglang_tailreplay.step import Step, Tokens

LAYERS, HEADS = (0, 1, 4), 2  # as in a model whose layers 2 and 3 are full attention
MODULES = [SimpleNamespace(layer_id=layer) for layer in LAYERS]


class Forward:
    def __init__(self):
        self.written, self.capturing, self.born = [], False, np.zeros(100, dtype=np.int64)
        self.capture = GateCapture(
            LAYERS, lambda *args: self.written.append(args), lambda ids: self.born[ids], lambda: self.capturing
        )

    def layers(self, a, modules=MODULES):
        """Every layer is given a, which is overwritten right after, as buffers are."""
        for number, module in enumerate(modules):
            given = (a + 10 * number).clone()
            self.capture.receive(module, given)
            given.fill_(float("nan"))

    def run(self, step, a, ran_graph=False):
        self.capture.begin(step)
        if ran_graph:  # what a graph does when it is replayed
            for number in range(len(LAYERS)):
                self.capture._graph_buffer[: len(a), number] = a + 10 * number
        else:
            self.layers(a)
        self.capture.end(ran_graph)


@pytest.fixture
def forward():
    return Forward()


def inputs(tokens: int, offset: float = 0) -> torch.Tensor:
    return torch.arange(tokens * HEADS).float().view(tokens, HEADS) / 100 + offset


def expected(a) -> torch.Tensor:
    return torch.stack([a + 10 * number for number in range(len(LAYERS))], dim=1)


def step(rows, positions=None, decode=False, owners=None) -> Step:
    rows = np.array(rows, dtype=np.int64)
    owners = np.zeros(len(rows), dtype=np.int64) if owners is None else np.array(owners)
    positions = np.arange(len(rows)) if positions is None else np.array(positions)
    return Step(rows, tokens=Tokens(owners, positions, decode))


def test_a_prefill_is_handed_on_at_once(forward):
    forward.run(step([5, NO_ROW, 2]), inputs(3))
    ((a, ids, tokens, owners, modules),) = forward.written
    assert torch.equal(a, expected(inputs(3))) and ids.tolist() == [5, NO_ROW, 2]
    assert tokens.positions.tolist() == [0, 1, 2] and modules == MODULES


def test_padding_is_left_out(forward):
    forward.run(step([1, 0]), inputs(8))
    assert torch.equal(forward.written[0][0], expected(inputs(8))[:2])


def test_steps_of_decode_are_handed_on_together(forward):
    for i in range(STEPS_TOGETHER):
        assert not forward.written
        forward.run(step([i, 50 + i], [i, i], True, [3, 4]), inputs(2, offset=i))
    ((a, ids, tokens, owners, _),) = forward.written
    assert torch.equal(a, torch.cat([expected(inputs(2, offset=i)) for i in range(STEPS_TOGETHER)]))
    assert ids.tolist() == [row for i in range(STEPS_TOGETHER) for row in (i, 50 + i)]
    assert tokens.positions.tolist() == [i for i in range(STEPS_TOGETHER) for _ in range(2)]


def test_a_prefill_sends_what_waits_before_it(forward):
    forward.run(step([7], [4], True), inputs(1))
    forward.run(step([8, 9], [5, 6]), inputs(2))
    assert forward.written[0][1].tolist() == [7, 8, 9] and len(forward.written) == 1


def test_what_waits_is_sent_when_asked_for(forward):
    forward.run(step([7], [4], True), inputs(1))
    forward.capture.flush()
    forward.capture.flush()
    assert [ids.tolist() for _, ids, *_ in forward.written] == [[7]]


def test_of_a_row_that_is_written_twice_the_last_write_counts(forward):
    """A request ended between two steps and its row went to another one: the first write is an earlier owner's."""
    forward.run(step([7], [4], True), inputs(1))
    forward.born[7] += 1
    forward.run(step([7], [0], True, [1]), inputs(1))
    forward.capture.flush()
    _, ids, _, owners, _ = forward.written[0]
    assert ids.tolist() == [NO_ROW, 7] and owners.tolist() == [0, 1]


def test_graphs_leave_their_inputs_in_a_buffer(forward):
    forward.capture.allocate_graph_buffer(4, HEADS, torch.float32, "cpu")
    forward.capturing = True
    forward.layers(inputs(4))  # as it is captured
    forward.capturing = False
    assert torch.equal(forward.capture._graph_buffer, expected(inputs(4)))
    with pytest.raises(AssertionError, match="5 tokens"):
        forward.capturing = True
        forward.layers(inputs(5))
    forward.capturing = False
    forward.run(step([3, 4, 5]), inputs(3, offset=7), ran_graph=True)
    forward.capture._graph_buffer.fill_(float("nan"))  # the next graph runs
    assert torch.equal(forward.written[0][0], expected(inputs(3, offset=7)))


@pytest.mark.parametrize("nothing", [None, Step(np.array([3])), step([]), step([NO_ROW])])
@pytest.mark.parametrize("ran_graph", [False, True])
def test_a_pass_whose_tokens_get_no_rows_is_not_kept(nothing, ran_graph, forward):
    forward.capture.allocate_graph_buffer(4, HEADS, torch.float32, "cpu")
    forward.run(nothing, inputs(2), ran_graph)
    forward.capture.flush()
    assert forward.written == []


def test_a_layer_that_is_missing_is_an_error(forward):
    forward.capture.begin(step([1]))
    forward.layers(inputs(1), MODULES[:2])
    with pytest.raises(AssertionError, match=r"\[4\]"):
        forward.capture.end(ran_graph=False)


def test_a_pass_that_failed_leaves_nothing(forward):
    forward.capture.begin(step([1, 2]))
    forward.layers(inputs(2), MODULES[:1])
    forward.capture.abandon()
    forward.run(step([4]), inputs(1, offset=3))
    assert [ids.tolist() for _, ids, *_ in forward.written] == [[4]]
    assert torch.equal(forward.written[0][0], expected(inputs(1, offset=3)))


def test_rows_are_whose_they_are_when_the_pass_is_launched(forward):
    forward.capture.begin(step([1]))
    forward.layers(inputs(1))
    forward.born[1] += 1  # given to another token, before the pass was handed on
    forward.capture.end(ran_graph=False)
    assert forward.written[0][3].tolist() == [0]
