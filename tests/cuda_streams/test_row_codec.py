"""Rows of a byte per number: what they keep, what an outlier costs, and that they pass through store and mover."""

import pytest
import torch

from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.mover import RowMover
from sglang_tailreplay.cuda_streams.recording import RecordingLanes
from sglang_tailreplay.cuda_streams.row_codec import MOVED_AS, make_codec
from sglang_tailreplay.cuda_streams.row_format import row_bytes

KINDS = ("fp8", "int8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H = 64


def through(kind, rows):
    codec = make_codec(kind, rows.shape[-1], rows.dtype)
    before, packed = rows.clone(), codec.pack(rows)
    assert torch.equal(rows, before) or rows.isnan().any() or rows.isinf().any()
    assert packed.shape == (*rows.shape[:-1], codec.width) and packed.dtype == MOVED_AS
    out = torch.empty_like(rows)
    codec.unpack(packed, out)
    return out


def relative(found, rows):
    return ((found.float() - rows.float()).norm(dim=-1) / rows.float().norm(dim=-1)).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, H), (7, 2560), (3, 5, 96), (2, 1500, H), (0, H)])
@pytest.mark.parametrize("kind, step", [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_a_number_is_off_by_half_a_step_at_most(kind, step, shape, dtype):
    """int8: of the row's largest number; fp8: of itself, or of what is too small for the format."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows *= 10.0 ** torch.arange(rows.shape[-2]).sub(2).clamp(max=2)[:, None].to(dtype)  # each row has its own scale
    found = through(kind, rows).float()
    largest = rows.float().abs().amax(-1, keepdim=True)
    bound = largest * step if kind == "int8" else (rows.float().abs() * step).maximum(largest * 2**-18)
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((found - rows.float()).abs() <= bound * 1.001 + rounding * largest).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_extremes(kind):
    rows = torch.zeros(4, H)
    rows[1] = 3e38
    rows[2, 5] = -1e-20
    found = through(kind, rows)
    assert torch.equal(found[[0, 3]], rows[[0, 3]]) and torch.allclose(found, rows, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_wrong_and_its_neighbours_right(kind, bad):
    rows = torch.ones(3, H)
    rows[1, 7] = bad
    found = through(kind, rows)
    assert not found[1].isfinite().any() and torch.allclose(found[[0, 2]], rows[[0, 2]])


def test_an_outlier_channel_costs_int8_the_others_and_fp8_little():
    rows = torch.randn(64, 2560, generator=torch.Generator().manual_seed(2))
    rows[:, 100] = 1000.0
    others = torch.ones(2560, dtype=torch.bool)
    others[100] = False
    lost = {kind: relative(through(kind, rows)[:, others], rows[:, others]) for kind in KINDS}
    assert lost["int8"] > 0.9 and lost["fp8"] < 0.04


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("static", [False, True])
def test_the_mover_packs_what_it_writes_and_unpacks_what_it_fetches(kind, dtype, static):
    lanes, codec = RecordingLanes(), make_codec(kind, H, dtype)
    mover = RowMover(torch.full((3, 12, codec.width), -1, dtype=MOVED_AS), lanes, codec=codec)
    source = torch.randn(3, 5, H).to(dtype)
    lanes.forward.writes(source)
    mover.write_out(None, source, [7, -1, 0, 3, 11])
    mover.write_out(1, source[1, :1], [5])
    out = torch.zeros(2, 3, H, dtype=dtype) if static else None
    fetched = mover.fetch([1, 2], [11, 7, 0], out=out)
    for group, one in zip((1, 2), fetched, strict=True):
        with lanes.replay.after(one.ready):
            lanes.replay.reads(one.tensor)
        assert one.tensor.dtype == dtype
        assert torch.equal(one.tensor, through(kind, source[group, [4, 0, 2]]))
    (again,) = mover.fetch([1], [5])
    assert torch.equal(again.tensor, through(kind, source[1, :1]))
    (unwritten,) = mover.fetch([0], [1])
    assert unwritten.tensor.isnan().all(), "a row that nobody wrote looks like one"


def test_without_a_codec_nothing_is_converted():
    assert make_codec("auto", H, torch.bfloat16) is None
    mover = RowMover(torch.zeros(1, 4, 8, dtype=torch.bfloat16), Lanes.create("cpu"))
    mover.write_out(0, torch.full((1, 8), 1.0078125, dtype=torch.bfloat16), [2])
    assert torch.equal(mover.fetch([0], [2])[0].tensor, mover.rows[0, 2:3])


@pytest.mark.parametrize("kind", KINDS)
def test_half_the_bytes_and_whole_vectors(kind):
    for hidden in (2560, 3840, 5120):
        codec = make_codec(kind, hidden, torch.bfloat16)
        assert codec.width * MOVED_AS.itemsize == row_bytes(hidden, kind, 2) == hidden + 16
        assert row_bytes(hidden, kind, 2) / row_bytes(hidden, "auto", 2) < 0.51
        assert codec.width * MOVED_AS.itemsize % 16 == 0
    with pytest.raises(ValueError, match="multiple of 16"):
        make_codec(kind, 72, torch.bfloat16)
