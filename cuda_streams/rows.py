"""Moves rows between the GPU and a host pool, by row id.

`rows [G, R, H]` is one CPU tensor: group, row, hidden size. With a CUDA source it must be pinned: one kernel reads or
writes it in place over the link, so that scattered rows cost no staging buffer and no host thread. On the CPU it is
indexed as usual.
"""

import torch

VECTOR = 16  # bytes a GPU thread moves at once


def scatter_rows(source: torch.Tensor, rows: torch.Tensor, group: int, ids: torch.Tensor) -> None:
    """rows[group, ids[t]] = source[t] for every t with ids[t] >= 0.

    source [T, H], ids [T] int64 on the source's device, no row twice. Runs on the current stream.
    Raises: ValueError for shapes or dtypes that do not fit. Ids are not checked against R.
    """
    scatter_groups(source[None], rows[group : group + 1], ids)


def scatter_groups(source: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """rows[g, ids[t]] = source[g, t] for every group g and every t with ids[t] >= 0. source [G, T, H]; see above."""
    _check(source, rows, ids)
    if source.is_cuda:
        _kernels().move_rows(source, rows, ids, to_rows=True)
        return
    kept = ids >= 0
    rows.index_copy_(1, ids[kept], source[:, kept])


def gather_rows(rows: torch.Tensor, group: int, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = rows[group, ids[t]]. ids [T] int64 on out's device, all in [0, R); out [T, H]. See `scatter_rows`."""
    tokens, rows = out[None], rows[group : group + 1]
    _check(tokens, rows, ids)
    if out.is_cuda:
        _kernels().move_rows(tokens, rows, ids, to_rows=False)
        return
    torch.index_select(rows[0], 0, ids, out=out)


def check_row_width(hidden_size: int, dtype: torch.dtype) -> None:
    """Raises: ValueError where a row is not a whole number of 16-byte vectors."""
    if hidden_size * dtype.itemsize % VECTOR:
        raise ValueError(f"a row must be a multiple of {VECTOR} bytes, got {hidden_size} x {dtype}")


def _check(tokens: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    G, T, H = tokens.shape
    if rows.ndim != 3 or rows.shape[0] != G or rows.shape[2] != H:
        raise ValueError(f"rows must be [G={G}, R, H={H}], got {tuple(rows.shape)}")
    if rows.dtype != tokens.dtype:
        raise ValueError(f"rows are {rows.dtype}, tokens {tokens.dtype}")
    if ids.shape != (T,) or ids.dtype != torch.int64 or ids.device != tokens.device:
        found = f"{list(ids.shape)} {ids.dtype} on {ids.device}"
        raise ValueError(f"ids must be [T={T}] int64 on {tokens.device}, got {found}")
    if not (rows[0].is_contiguous() and (G == 0 or tokens[0].is_contiguous())):
        raise ValueError("rows and tokens must be contiguous within a group")
    check_row_width(H, rows.dtype)


def _kernels():
    from sglang_tailreplay.cuda_streams import row_kernels

    return row_kernels
