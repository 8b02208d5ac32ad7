"""The metadata of a launch: what a varlen kernel reads gives every token's place exactly once, whatever the room."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_tailreplay.replay.segments import CHUNK, NO_SLOT, SegmentTable, chunk_count, describe
from sglang_tailreplay.replay.tail import Launch, Piece

CPU = torch.device("cpu")


def launch_of(lengths, first_hit=0, continues=False):
    return Launch(tuple(Piece(first_hit + i, 0, n, continues) for i, n in enumerate(lengths)))


LENGTHS = st.lists(st.integers(1, 3 * CHUNK + 1), min_size=1, max_size=4)


@given(LENGTHS, st.integers(0, 200))
def test_chunks_cover_every_token_once_and_nothing_else(lengths, more):
    table = SegmentTable(4, 20, CPU)
    slots = torch.arange(10, 10 + len(lengths), dtype=torch.int32)
    table.load(launch_of(lengths), slots)
    tokens = sum(lengths) + more
    seen = []
    for segments in (table.whole(tokens), table.exact(launch_of(lengths))):
        covered = []
        for segment, chunk in segments.chunks.tolist():
            begin, end = segments.cu[segment : segment + 2].tolist()
            covered += range(begin + chunk * CHUNK, min(begin + (chunk + 1) * CHUNK, end))
        assert covered == list(range(sum(lengths)))
        states = [s for s, n in zip(segments.slots.tolist(), segments.cu.diff().tolist(), strict=True) if n]
        assert states == slots.tolist()
        seen.append(segments)
    whole, exact = seen
    assert (whole.slots[len(lengths) :] == NO_SLOT).all() and (whole.cu[len(lengths) :] == sum(lengths)).all()
    assert exact.lengths == tuple(lengths) and len(exact.chunks) == chunk_count(lengths)
    counts = [-(-n // CHUNK) for n in lengths]
    assert exact.chunk_offsets.tolist() == np.cumsum([0, *counts]).tolist()


def test_slots_and_first_chunks_of_a_later_launch():
    """A launch that begins with the rest of hit 3: its slots are those of hits 3 and 4."""
    table = SegmentTable(4, 20, CPU)
    launch = Launch((Piece(3, 64, 70, True), Piece(4, 0, 5, False)))
    table.load(launch, torch.tensor([9, 8, 7, 6, 5], dtype=torch.int32))
    segments = table.exact(launch)
    assert segments.slots.tolist() == [6, 5]
    assert segments.continues.tolist() == [1, 0]
    table.load(launch_of([1]), torch.tensor([2], dtype=torch.int32))
    assert table.whole(64).slots.tolist() == [2, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT], (
        "nothing of the last launch is left"
    )
    assert table.whole(64).continues.tolist() == [0] * 5


@pytest.mark.parametrize("lengths, segments, chunks", [([1, 1], 2, 9), ([65], 4, 1)])
def test_a_launch_that_does_not_fit_is_refused(lengths, segments, chunks):
    with pytest.raises(ValueError, match="room for"):
        describe(launch_of(lengths), segments, chunks)


@given(LENGTHS)
def test_a_bucket_has_room_for_every_cut_of_its_tokens(lengths):
    table = SegmentTable(4, (sum(lengths)) // CHUNK + 4, CPU)
    table.load(launch_of(lengths), torch.zeros(len(lengths), dtype=torch.int32))
    assert len(table.whole(sum(lengths)).chunks) >= chunk_count(lengths)
