"""Triton kernels of `rows.py`. Imported only where a CUDA tensor is moved: machines without a GPU have no triton."""

import triton
import triton.language as tl

# 16 programs of 4096 elements reach what 64 reach on an H200 (132 multiprocessors): 49 GB/s out, 45 GB/s in at H=2560
# and 5120 in bf16. With 8 the way in halves. The forward pass keeps the rest of the GPU.
PROGRAMS = 16
TILE = 4096  # elements a program has in flight: 8 KB of bf16, four 16-byte loads per thread


@triton.jit(do_not_specialize=["T", "G", "token_stride", "row_stride"])
def move_rows_kernel(
    p_tokens,  # [G, T, H]
    p_rows,  # [G, R, H]
    p_ids,  # [T] int64; below 0: no row
    T,
    G,
    token_stride,  # elements from group to group
    row_stride,
    H: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,  # a power of two; the last tile of a row may be cut
    TO_ROWS: tl.constexpr,
):
    """Copies tokens to rows or rows to tokens. Programs stride over tiles of [BT, BH] elements."""
    tiles_h: tl.constexpr = (H + BH - 1) // BH
    tiles_t = tl.cdiv(T, BT)
    for tile in range(tl.program_id(0), G * tiles_t * tiles_h, tl.num_programs(0)):
        i_h = tile % tiles_h
        i_t = (tile // tiles_h) % tiles_t
        i_g = (tile // (tiles_h * tiles_t)).to(tl.int64)
        o_t = i_t * BT + tl.arange(0, BT)
        o_h = i_h * BH + tl.arange(0, BH)
        ids = tl.load(p_ids + o_t, mask=o_t < T, other=-1).to(tl.int64)
        mask = (ids >= 0)[:, None] & (o_h < H)[None, :]
        tokens = p_tokens + i_g * token_stride + o_t.to(tl.int64)[:, None] * H + o_h[None, :]
        rows = p_rows + i_g * row_stride + ids[:, None] * H + o_h[None, :]
        if TO_ROWS:
            tl.store(rows, tl.load(tokens, mask=mask), mask=mask)
        else:
            tl.store(tokens, tl.load(rows, mask=mask), mask=mask)


def move_rows(tokens, rows, ids, to_rows: bool) -> None:
    """tokens [G, T, H] cuda, rows [G, R, H] pinned or cuda, ids [T] int64 cuda. Runs on the current stream."""
    G, T, H = tokens.shape
    if T == 0 or G == 0:
        return
    block_h = H & -H  # the largest power of two that divides H
    if block_h < 64:  # scattered over the link in such pieces, rows would crawl; an odd end wastes lanes, no bytes
        block_h = triton.next_power_of_2(H)
    block_h = min(block_h, 1024)
    block_t = TILE // block_h
    tiles = G * triton.cdiv(T, block_t) * triton.cdiv(H, block_h)
    move_rows_kernel[(min(PROGRAMS, tiles),)](
        tokens, rows, ids, T, G, tokens.stride(0), rows.stride(0), H=H, BT=block_t, BH=block_h, TO_ROWS=to_rows,
        num_warps=4,
    )  # fmt: skip
