import pytest
import torch

from sglang_tailreplay.cuda_streams.rows import check_row_width, gather_rows, scatter_groups, scatter_rows

G, R, H = 3, 10, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scatter_writes_the_named_rows_and_no_other(dtype):
    rows = torch.full((G, R, H), -1.0, dtype=dtype)
    source = torch.arange(4 * H, dtype=dtype).view(4, H)
    scatter_rows(source, rows, 1, torch.tensor([7, -1, 0, 3]))
    assert torch.equal(rows[1, [7, 0, 3]], source[[0, 2, 3]])
    assert (rows[[0, 2]] == -1).all() and (rows[1, [1, 2, 4, 5, 6, 8, 9]] == -1).all()


def test_scatter_groups_writes_every_group_and_gather_reads_one():
    rows = torch.zeros(G, R, H)
    source, ids = torch.randn(G, 5, H), torch.tensor([9, 2, -1, 4, 0])
    scatter_groups(source, rows, ids)
    for g in range(G):
        out = torch.empty(3, H)
        gather_rows(rows, g, torch.tensor([4, 9, 4]), out)
        assert torch.equal(out, source[g, [3, 0, 3]])


@pytest.mark.parametrize("ids", [[], [-1, -1]])
def test_nothing_to_write(ids):
    rows = torch.zeros(G, R, H)
    scatter_rows(torch.ones(len(ids), H), rows, 0, torch.tensor(ids, dtype=torch.int64))
    assert (rows == 0).all()


@pytest.mark.parametrize(
    "source, ids, word",
    [
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), "H=4"),
        (torch.zeros(2, H, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64), "bfloat16"),
        (torch.zeros(2, H), torch.zeros(3, dtype=torch.int64), "T=2"),
        (torch.zeros(2, H), torch.zeros(2, dtype=torch.int32), "int32"),
        (torch.zeros(2, 2 * H)[:, ::2], torch.zeros(2, dtype=torch.int64), "contiguous"),
    ],
)
def test_misuse_is_named(source, ids, word):
    with pytest.raises(ValueError, match=word):
        scatter_rows(source, torch.zeros(G, R, H), 0, ids)


def test_rows_are_whole_vectors():
    check_row_width(2560, torch.bfloat16)
    with pytest.raises(ValueError, match="16 bytes"):
        check_row_width(12, torch.bfloat16)
