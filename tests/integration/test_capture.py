"""What a forward pass hands to the row store, and that a pass that hands over too little is an error."""

import numpy as np
import pytest
import torch

from sglang_tailreplay.capture import STEPS_TOGETHER, TOKENS_TOGETHER, Capture, keep_last
from sglang_tailreplay.radix.rows import NO_ROW

D = 4
ROW_OF_LAYER = {4: 0, 8: 1, 12: 2}  # three groups, as in a model of 16 layers


class Forward:
    """A capture, what it wrote out, and a model whose layers give it hidden states."""

    def __init__(self):
        self.written = []  # (group, source, ids)
        self.capturing = False
        self.capture = Capture(ROW_OF_LAYER, lambda *args: self.written.append(args), lambda: self.capturing)

    def layers(self, hidden, layers=tuple(range(16))):
        """Run layers; layer i gets hidden[i]. Every tensor is overwritten right after, as buffers are."""
        for layer in layers:
            sink = self.capture.sink_for(layer)
            if sink is not None:
                h = hidden(layer).clone()
                sink.append(h)
                h.fill_(float("nan"))


@pytest.fixture
def forward():
    return Forward()


def hidden(tokens: int, offset: float = 0):
    """layer -> [tokens, D], a different number for every token and layer."""
    return lambda layer: torch.arange(tokens).float()[:, None].expand(tokens, D) + 100 * layer + offset


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_an_eager_pass_writes_each_group_once_and_keeps_no_buffer(forward):
    rows = ids(5, NO_ROW, 2)
    forward.capture.begin(rows)
    forward.layers(hidden(3))
    forward.capture.end(ran_graph=False)
    assert [group for group, _, _ in forward.written] == [0, 1, 2]
    for (_, source, written), layer in zip(forward.written, ROW_OF_LAYER, strict=True):
        assert torch.equal(source, hidden(3)(layer)) and written.tolist() == rows.tolist()


def test_rows_of_padding_are_left_out(forward):
    forward.capture.begin(ids(1, 0))
    forward.layers(hidden(8))
    forward.capture.end(ran_graph=False)
    for (_, source, _), layer in zip(forward.written, ROW_OF_LAYER, strict=True):
        assert torch.equal(source, hidden(8)(layer)[:2])


@pytest.mark.parametrize("rows", [None, ids(), ids(NO_ROW, NO_ROW)], ids=str)
@pytest.mark.parametrize("ran_graph", [False, True])
def test_a_pass_without_rows_writes_nothing(rows, ran_graph, forward):
    forward.capture.begin(rows)
    assert all(forward.capture.sink_for(layer) is None for layer in range(16))
    forward.capture.end(ran_graph)
    assert forward.written == []


def test_only_the_first_layer_of_a_group_is_captured(forward):
    assert all(forward.capture.sink_for(layer) is None for layer in range(16))  # no pass
    forward.capture.begin(ids(1))
    assert [layer for layer in range(16) if forward.capture.sink_for(layer) is not None] == list(ROW_OF_LAYER)


def test_a_group_that_is_missing_is_an_error(forward):
    forward.capture.begin(ids(1))
    forward.layers(hidden(1), layers=(0, 4, 12))
    with pytest.raises(AssertionError, match=r"groups \[1\]"):
        forward.capture.end(ran_graph=False)
    forward.capture.begin(None)  # the error does not stick to the next pass
    forward.capture.end(ran_graph=False)


def test_sglang_need_not_clone(forward):
    forward.capture.begin(ids(1))
    assert forward.capture.sink_for(4).copies_on_append


# ---- CUDA graphs ----


@pytest.fixture
def captured(forward):
    """A forward whose graphs were captured, which wrote nothing out."""
    forward.capture.allocate_graph_buffer(6, D, torch.float32, "cpu")
    forward.capturing = True
    forward.layers(hidden(6))
    forward.layers(hidden(2))
    forward.capturing = False
    assert forward.written == []
    return forward


def replay_graph(captured, tokens: int, offset: float):
    """What a replayed graph does: fill the buffer that was captured, past all Python code."""
    captured.capturing = True
    captured.layers(hidden(tokens, offset))
    captured.capturing = False


def graph_step(captured, rows: np.ndarray, offset: float, padding: int = 0):
    captured.capture.begin(rows)
    replay_graph(captured, len(rows) + padding, offset)
    captured.capture.end(ran_graph=True)


def test_a_graph_sends_all_groups_at_once(captured):
    graph_step(captured, ids(3, NO_ROW, 1), offset=0.5, padding=1)
    replay_graph(captured, 4, offset=0.7)  # the next graph overwrites the buffer
    captured.capture.flush()
    ((group, source, rows),) = captured.written
    assert group is None and source.shape == (3, 3, D) and rows.tolist() == [3, NO_ROW, 1]
    for row, layer in enumerate(ROW_OF_LAYER):
        assert torch.equal(source[row], hidden(3, 0.5)(layer))
    captured.capture.flush()
    assert len(captured.written) == 1


def test_steps_are_sent_together_in_their_order(captured):
    for i in range(STEPS_TOGETHER):
        assert captured.written == []
        graph_step(captured, ids(2 * i, 2 * i + 1), offset=i / 100)
    ((group, source, rows),) = captured.written
    assert group is None and rows.tolist() == list(range(2 * STEPS_TOGETHER))
    for row, layer in enumerate(ROW_OF_LAYER):
        assert torch.equal(source[row], torch.cat([hidden(2, i / 100)(layer) for i in range(STEPS_TOGETHER)]))


def test_a_row_that_was_given_away_between_two_steps_is_written_once(captured):
    graph_step(captured, ids(4, 5), offset=0.1)
    graph_step(captured, ids(6, 4), offset=0.2)
    captured.capture.flush()
    ((_, source, rows),) = captured.written
    assert rows.tolist() == [NO_ROW, 5, 6, 4]
    assert torch.equal(source[0, 3], hidden(2, 0.2)(4)[1])


def test_an_eager_pass_writes_after_the_steps_before_it(captured):
    graph_step(captured, ids(4), offset=0.1)
    captured.capture.begin(ids(4))
    captured.layers(hidden(1))
    captured.capture.end(ran_graph=False)
    assert [group for group, _, _ in captured.written] == [None, 0, 1, 2]


@pytest.mark.parametrize(
    "rows, kept",
    [
        ([], []),
        ([3, 1, 2], [3, 1, 2]),
        ([3, 3, 3], [NO_ROW, NO_ROW, 3]),
        ([NO_ROW, 0, NO_ROW, 0, 5], [NO_ROW, NO_ROW, NO_ROW, 0, 5]),
    ],
)
def test_the_last_write_of_a_row_counts(rows, kept):
    assert keep_last(ids(*rows)).tolist() == kept


def test_passes_do_not_nest(forward):
    forward.capture.begin(ids(1))
    with pytest.raises(AssertionError, match="inside another"):
        forward.capture.begin(ids(1))


def test_the_buffer_stays_where_the_graph_has_it(captured):
    address = captured.capture._graph_buffer.data_ptr()
    for offset in (1, 2):
        graph_step(captured, ids(0), offset)
        captured.capture.flush()
    assert captured.capture._graph_buffer.data_ptr() == address


def test_a_graph_that_the_buffer_cannot_hold_is_an_error(forward):
    forward.capture.allocate_graph_buffer(2, D, torch.float32, "cpu")
    forward.capturing = True
    with pytest.raises(AssertionError, match="graph of 5 tokens, .* has 2"):
        forward.layers(hidden(5))


def test_many_tokens_do_not_wait_for_more_steps(forward):
    tokens = TOKENS_TOGETHER // 2
    forward.capture.allocate_graph_buffer(tokens, D, torch.float32, "cpu")
    graph_step(forward, np.arange(tokens), offset=0.1)
    assert forward.written == []
    graph_step(forward, np.arange(tokens, 2 * tokens), offset=0.2)
    ((_, source, rows),) = forward.written
    assert source.shape[1] == len(rows) == TOKENS_TOGETHER


# ---- failures ----


@pytest.mark.parametrize("seen", [(), (4,), tuple(ROW_OF_LAYER)])
def test_an_abandoned_pass_leaves_nothing_behind(seen, forward):
    forward.capture.begin(ids(7))
    forward.layers(hidden(1), layers=seen)
    forward.capture.abandon()
    assert all(forward.capture.sink_for(layer) is None for layer in range(16))
    forward.written.clear()
    forward.capture.begin(ids(2, 3))
    forward.layers(hidden(2))
    forward.capture.end(ran_graph=False)
    assert [(group, rows.tolist()) for group, _, rows in forward.written] == [(g, [2, 3]) for g in range(3)]
