"""States inside a prefill pass: which positions, where they lie in the pass, and what is saved of them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.pass_anchors import Keep, PassAnchors, locate, positions_inside
from sglang_tailreplay.replay.segments import CHUNK


@pytest.mark.parametrize(
    "begin, end, last, interval, expected",
    [
        (0, 8192, 0, 2048, [2048, 4096, 6144]),  # the end is no position inside
        (8192, 16384, 6144, 2048, [8256, 10304, 12352, 14400]),  # an interval behind the last one is where it begins
        (0, 300, 0, 100, [128, 256]),
        (0, 64, 0, 1, []),
        (0, 65, 0, 1, [64]),
        (70, 270, 0, 64, [134, 198, 262]),
        (70, 270, 68, 128, [198]),
        (5, 5, 0, 64, []),
    ],
)
def test_positions(begin, end, last, interval, expected):
    assert positions_inside(begin, end, last, interval) == expected


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 3000))
def test_positions_lie_on_chunks_an_interval_apart_and_no_further(begin, tokens, behind, interval):
    end, last = begin + tokens, max(0, begin - behind)
    found = positions_inside(begin, end, last, interval)
    assert all(begin < p < end and (p - begin) % CHUNK == 0 for p in found)
    gaps = [b - a for a, b in zip([last, *found], found, strict=False)]
    assert all(interval <= gap for gap in gaps)
    assert all(gap < interval + CHUNK for gap in gaps[1:])
    assert found or not gaps
    assert end - (found or [last])[-1] <= max(interval, begin - last) + CHUNK


def test_where_they_lie_in_the_pass():
    """Two requests of 130 and 64 tokens and one of 70: chunks 0-2, 3 and 4-5."""
    keeps = [Keep(0, 1, 0), Keep(0, 2, 1), Keep(2, 1, 2)]
    chunks, windows = locate([130, 64, 70], keeps, 3)
    assert chunks.tolist() == [1, 2, 5]
    assert windows.tolist() == [[61, 62, 63], [125, 126, 127], [255, 256, 257]]


@pytest.mark.parametrize("keep", [Keep(1, 1, 0), Keep(0, 0, 0), Keep(0, 3, 0)])
def test_a_state_that_the_pass_does_not_go_through_is_an_error(keep):
    with pytest.raises(AssertionError, match="no states inside"):
        locate([130, 64], [keep], 3)


class Pool:
    mamba_map = {2: 0, 5: 1}

    def get_mamba_indices(self, requests):
        return requests + 10

    def translate_mamba_indices(self, slots):
        return slots


class Store:
    window = 3

    def __init__(self):
        self.kept = []

    def keep(self, layer, states, anchors):
        self.kept.append((layer, [part.clone() for part in states], list(anchors)))


class Core:
    """Writes over its input, as SGLang's convolution does; a chunk's state is its number."""

    def attend_and_keep(self, layer, qkv, b, a, segments, chunks):
        qkv.zero_()
        self.segments = segments
        return torch.zeros(1, len(qkv), 4, 8), chunks.float()[:, None, None, None].expand(-1, 4, 8, 2)


@pytest.fixture
def anchors():
    return PassAnchors(Core(), Pool(), Store(), torch.device("cpu"))


def batch(lengths, prefixes):
    requests = torch.arange(len(lengths))
    return SimpleNamespace(
        extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=prefixes, req_pool_indices=requests, batch_size=len(lengths)
    )


def test_every_layer_hands_over_its_part(anchors):
    anchors.begin(batch([130, 70], [0, 9]), [Keep(0, 2, 7), Keep(1, 1, 4)])
    assert anchors.active
    for layer in (2, 5):
        qkv = torch.arange(200.0)[:, None].expand(200, 6).clone()
        o = anchors.attend(SimpleNamespace(layer_id=layer), qkv, torch.zeros(200, 4), torch.zeros(200, 4))
        assert o.shape == (1, 200, 4, 8)
    segments = anchors._core.segments
    assert segments.cu.tolist() == [0, 130, 200] and segments.slots.tolist() == [10, 11]
    assert segments.continues.tolist() == [0, 1] and segments.lengths == (130, 70)
    anchors.end()
    assert not anchors.active
    for (layer, (conv, states), places), expected in zip(anchors._store.kept, (0, 1), strict=True):
        assert (layer, places) == (expected, [7, 4])
        assert conv[:, 0].tolist() == [[125, 126, 127], [191, 192, 193]] and conv.shape == (2, 6, 3)
        assert states[:, 0, 0, 0].tolist() == [2, 4]


def test_a_layer_that_the_pass_went_past_is_an_error(anchors):
    anchors.begin(batch([130], [0]), [Keep(0, 1, 0)])
    anchors.attend(SimpleNamespace(layer_id=2), torch.zeros(130, 6), torch.zeros(130, 4), torch.zeros(130, 4))
    with pytest.raises(AssertionError, match=r"anchors of layers \[5\]"):
        anchors.end()
    assert not anchors.active, "or the next pass would go on with it"


def test_a_pass_that_failed_is_forgotten(anchors):
    anchors.begin(batch([130], [0]), [Keep(0, 1, 0)])
    anchors.abandon()
    anchors.end()
    assert not anchors.active
