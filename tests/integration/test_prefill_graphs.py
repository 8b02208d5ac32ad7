"""What a prefill graph is told about its pass."""

import torch

from sglang_tailreplay.prefill_graphs import MAX_REQUESTS, PrefillGraphs, launch_of


class Pool:
    """Request slots 0..9 have the state slots 100..109, virtual and one below the physical ones."""

    def get_mamba_indices(self, requests):
        return requests + 99

    def translate_mamba_indices(self, slots):
        return slots + 1


class Batch:
    def __init__(self, lengths, prefixes, requests):
        self.extend_seq_lens_cpu, self.extend_prefix_lens_cpu = lengths, prefixes
        self.req_pool_indices = torch.tensor(requests)
        self.batch_size = len(lengths)


class Core:
    """Notes the segments that the layers are given."""

    def attend(self, layer, qkv, b, a, segments):
        self.segments = segments
        return torch.zeros(len(qkv), 4, 8)


class Layer:
    layer_id = 4


def attend(graphs, tokens):
    o = graphs.attend(Layer(), torch.zeros(tokens, 32), torch.zeros(tokens, 4), torch.zeros(tokens, 4))
    assert o.shape == (1, tokens, 4, 8)


def test_a_pass_in_a_larger_graph():
    core = Core()
    graphs = PrefillGraphs(core, Pool(), 256, torch.device("cpu"), {})
    graphs.load(Batch([70, 1, 5], [0, 9, 300], [4, 0, 7]))
    attend(graphs, 96)
    segments = core.segments
    assert segments.cu[:4].tolist() == [0, 70, 71, 76] and (segments.cu[4:] == 76).all()
    assert segments.slots[:3].tolist() == [104, 100, 107] and (segments.slots[3:] == -1).all()
    assert segments.continues[:3].tolist() == [0, 1, 1], "a prefix means a state in the slot: of a chunk or a replay"
    assert segments.chunks[:4].tolist() == [[0, 0], [0, 1], [1, 0], [2, 0]]


def test_while_a_graph_is_captured_no_state_is_written():
    core = Core()
    graphs = PrefillGraphs(core, Pool(), 256, torch.device("cpu"), {})
    graphs.load(Batch([70, 1, 5], [0, 9, 300], [4, 0, 7]))
    graphs.load_for_capture(128)
    attend(graphs, 128)
    assert (core.segments.slots == -1).all() and core.segments.cu[1] == 128


def test_the_largest_pass_fits_whatever_its_requests():
    graphs = PrefillGraphs(Core(), Pool(), 64, torch.device("cpu"), {})
    requests = list(range(MAX_REQUESTS))
    batch = Batch([2] * MAX_REQUESTS, [0] * MAX_REQUESTS, requests)
    assert graphs.fits(batch)
    graphs.load(batch)
    attend(graphs, 64)
    assert not graphs.fits(Batch([1] * (MAX_REQUESTS + 1), [5] * (MAX_REQUESTS + 1), range(MAX_REQUESTS + 1)))


def test_the_requests_of_a_batch_are_pieces():
    launch = launch_of([3, 4], [0, 1])
    assert [(piece.hit, piece.length, piece.continues) for piece in launch.pieces] == [(0, 3, False), (1, 4, True)]


class Gate:
    def __init__(self, order):
        self.order = order

    def wait(self):
        self.order.append("gate")


def test_the_first_layer_of_a_group_waits_at_its_gate():
    order = []

    class Noting(Core):
        def attend(self, layer, *args):
            order.append(layer.layer_id)
            return super().attend(layer, *args)

    graphs = PrefillGraphs(Noting(), Pool(), 64, torch.device("cpu"), {4: Gate(order)})
    graphs.load_for_capture(64)
    attend(graphs, 64)
    Layer.layer_id = 5
    attend(graphs, 64)
    Layer.layer_id = 4
    assert order == ["gate", 4, 5]
