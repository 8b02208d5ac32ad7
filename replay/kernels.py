"""Triton kernels of a GDN layer around its matrix products: few launches, no pass over memory that another one makes.

All read the segments of `segments.py`, one program per chunk, so that they can be captured in a CUDA graph and run
again for other segments. Imported only where CUDA tensors are used: machines without a GPU have no triton.

Shapes: T tokens, H key heads, HV value heads, K and V their sizes, W width of the convolution, C = 2*H*K + HV*V.
Rounding follows SGLang's kernels: the convolution's output and beta are rounded to the model's dtype.
"""

import torch
import triton
import triton.language as tl

from sglang_tailreplay.replay.segments import CHUNK, Segments

Tensor = torch.Tensor
ROWS = 32  # tokens of a program of the convolution: with a whole chunk of them too few programs fit on the GPU at once


def conv_heads(
    qkv: Tensor,
    weight: Tensor,
    state: Tensor,
    segments: Segments,
    heads: tuple[int, int, int, int],
    queries: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Causal convolution and SiLU over qkv, split into heads, q and k normalised to length 1. Updates the conv state.

    qkv [T, C], rows of any stride; weight [C, W]; state [slots, C, W-1]; heads = (H, HV, K, V). Returns q [T, H, K]
    (None unless `queries`), k [T, H, K], v [T, HV, V]; undefined for tokens of no segment. The state of the q channels
    is written either way.
    """
    H, HV, K, V = heads
    T, (C, W) = qkv.shape[0], weight.shape
    assert qkv.shape[1] == C == 2 * H * K + HV * V and qkv.stride(1) == 1 and weight.is_contiguous()
    assert state.shape[1:] == (C, W - 1), tuple(state.shape)
    q = qkv.new_empty(T, H, K) if queries else None
    k, v = qkv.new_empty(T, H, K), qkv.new_empty(T, HV, V)
    grid = (len(segments.chunks) * (CHUNK // ROWS), 2 * H + HV)
    _conv_heads_kernel[grid](
        qkv, weight, state, q if queries else k, k, v,
        segments.cu, segments.slots, segments.continues, segments.chunks,
        qkv.stride(0), *state.stride(),
        H=H, K=K, V=V, W=W, HV=HV, BW=triton.next_power_of_2(W - 1), CHUNK=CHUNK, BT=ROWS,
        BD=triton.next_power_of_2(max(K, V)), FIRST_HEAD=0 if queries else H, num_warps=4,
    )  # fmt: skip
    return q, k, v


@triton.jit
def _conv_heads_kernel(
    p_x, p_w, p_state, p_q, p_k, p_v, p_cu, p_slots, p_continues, p_chunks,
    token_stride, slot_stride, channel_stride, window_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, HV: tl.constexpr,
    BW: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, FIRST_HEAD: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens of a chunk, one head. A segment's first program reads and writes the conv state."""
    i_c, i_h = tl.program_id(0) // (CHUNK // BT), tl.program_id(1)
    segment, chunk = tl.load(p_chunks + 2 * i_c), tl.load(p_chunks + 2 * i_c + 1)
    begin = tl.load(p_cu + segment)
    T = tl.load(p_cu + segment + 1) - begin
    t0 = chunk * CHUNK + tl.program_id(0) % (CHUNK // BT) * BT
    if t0 >= T:
        return
    size = tl.where(i_h < 2 * H, K, V)
    first_channel = tl.where(i_h < 2 * H, i_h * K, 2 * H * K + (i_h - 2 * H) * V)
    o_d = tl.arange(0, BD)
    channels = first_channel + o_d
    in_head = o_d < size

    x = p_x + begin.to(tl.int64) * token_stride + channels
    slot = tl.load(p_slots + segment).to(tl.int64)
    state = p_state + slot * slot_stride + channels * channel_stride
    has_state = (t0 == 0) & (slot >= 0)
    continues = has_state & (tl.load(p_continues + segment) != 0)

    o_t = t0 + tl.arange(0, BT)
    acc = tl.zeros([BT, BD], dtype=tl.float32)
    if i_h >= FIRST_HEAD:
        for j in tl.static_range(W):
            t = o_t - (W - 1) + j
            mask = ((t >= 0) & (t < T))[:, None] & in_head[None, :]
            tile = tl.load(x[None, :] + t[:, None].to(tl.int64) * token_stride, mask=mask, other=0.0).to(tl.float32)
            if continues:
                before = (t < 0)[:, None] & in_head[None, :]
                at = state[None, :] + (W - 1 + t)[:, None] * window_stride
                tile += tl.load(at, mask=before, other=0.0).to(tl.float32)
            weight = tl.load(p_w + channels * W + j, mask=in_head, other=0.0).to(tl.float32)
            acc += tile * weight[None, :]

    if has_state:
        # The last W-1 inputs; where the segment is shorter, what was in the window moves up.
        o_w = tl.arange(0, BW)
        t = T - (W - 1) + o_w
        mask = ((t >= 0) & (o_w < W - 1))[:, None] & in_head[None, :]
        window = tl.load(x[None, :] + t[:, None].to(tl.int64) * token_stride, mask=mask, other=0.0).to(tl.float32)
        if continues:
            mask = ((t < 0) & (o_w < W - 1))[:, None] & in_head[None, :]
            window += tl.load(state[None, :] + (W - 1 + t)[:, None] * window_stride, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.debug_barrier()  # every thread has read the old window before any writes the new one
        at = state[None, :] + o_w[:, None] * window_stride
        tl.store(at, window.to(p_state.dtype.element_ty), mask=(o_w < W - 1)[:, None] & in_head[None, :])

    if i_h >= FIRST_HEAD:
        y = (acc / (1 + tl.exp(-acc))).to(p_k.dtype.element_ty)
        rows = (begin + o_t).to(tl.int64)[:, None]
        mask = (o_t < T)[:, None] & in_head[None, :]
        if i_h < 2 * H:
            f = y.to(tl.float32)
            f = f / tl.sqrt(tl.sum(f * f, axis=1) + 1e-6)[:, None]
            y = f.to(p_k.dtype.element_ty)
            if i_h < H:
                tl.store(p_q + rows * (H * K) + i_h * K + o_d[None, :], y, mask=mask)
            else:
                tl.store(p_k + rows * (H * K) + (i_h - H) * K + o_d[None, :], y, mask=mask)
        else:
            tl.store(p_v + rows * (HV * V) + (i_h - 2 * H) * V + o_d[None, :], y, mask=mask)


def gates(
    b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, segments: Segments, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Decay and write strength: g [1, T, HV], the log decay summed up within each chunk, and beta [1, T, HV]; float32.

    b, a [T, HV], rows of any stride; A_log, dt_bias [HV]. beta_scale 2 where eigenvalues may be negative. Undefined for
    tokens of no segment.
    """
    T, HV = a.shape
    assert b.shape == a.shape and b.stride(1) == a.stride(1) == 1
    g, beta = (torch.empty(1, T, HV, dtype=torch.float32, device=a.device) for _ in range(2))
    heads = 16
    _gates_kernel[(len(segments.chunks), triton.cdiv(HV, heads))](
        b, a, A_log, dt_bias, g, beta, segments.cu, segments.chunks, b.stride(0), a.stride(0),
        HV=HV, BT=CHUNK, BH=heads, BETA_SCALE=beta_scale, num_warps=4,
    )  # fmt: skip
    return g, beta


@triton.jit
def _gates_kernel(
    p_b, p_a, p_A_log, p_dt_bias, p_g, p_beta, p_cu, p_chunks, b_stride, a_stride,
    HV: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BETA_SCALE: tl.constexpr,
):  # fmt: skip
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    segment, chunk = tl.load(p_chunks + 2 * i_c), tl.load(p_chunks + 2 * i_c + 1)
    begin = tl.load(p_cu + segment)
    T = tl.load(p_cu + segment + 1) - begin
    if chunk * BT >= T:
        return
    o_t = chunk * BT + tl.arange(0, BT)
    o_h = i_h * BH + tl.arange(0, BH)
    heads = o_h < HV
    mask = (o_t < T)[:, None] & heads[None, :]
    rows = (begin + o_t).to(tl.int64)[:, None]
    a = tl.load(p_a + rows * a_stride + o_h[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(p_b + rows * b_stride + o_h[None, :], mask=mask, other=0.0)
    A = tl.exp(tl.load(p_A_log + o_h, mask=heads, other=0.0).to(tl.float32))
    x = a + tl.load(p_dt_bias + o_h, mask=heads, other=0.0).to(tl.float32)[None, :]
    softplus = tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x)
    g = tl.cumsum(tl.where(mask, -A[None, :] * softplus, 0.0), axis=0)
    beta = (BETA_SCALE * tl.sigmoid(b.to(tl.float32))).to(p_b.dtype.element_ty)
    at = rows * HV + o_h[None, :]
    tl.store(p_g + at, g, mask=mask)
    tl.store(p_beta + at, beta.to(tl.float32), mask=mask)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, sigmoid_gate: bool = False) -> Tensor:
    """RMS norm of every head, times SiLU of the gate (or its sigmoid): y [T, HV*V] in o's dtype.

    o [T, HV, V] contiguous; z [T, HV*V], rows of any stride; weight [V].
    """
    T, HV, V = o.shape
    assert z.shape == (T, HV * V) and z.stride(1) == 1 and o.is_contiguous()
    y = o.new_empty(T, HV * V)
    rows = 16
    _gated_norm_kernel[(triton.cdiv(T * HV, rows),)](
        o, z, weight, y, T * HV, z.stride(0), eps,
        HV=HV, V=V, BR=rows, BV=triton.next_power_of_2(V), SIGMOID=sigmoid_gate, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["R"])
def _gated_norm_kernel(
    p_o, p_z, p_w, p_y, R, z_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    mask = (rows < R)[:, None] & (o_v < V)[None, :]
    at = rows[:, None].to(tl.int64) * V + o_v[None, :]
    o = tl.load(p_o + at, mask=mask, other=0.0).to(tl.float32)
    token, head = (rows // HV).to(tl.int64), rows % HV
    z = tl.load(p_z + token[:, None] * z_stride + (head * V)[:, None] + o_v[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    w = tl.load(p_w + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * w[None, :]
    gate = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    tl.store(p_y + at, (y * gate).to(p_y.dtype.element_ty), mask=mask)
