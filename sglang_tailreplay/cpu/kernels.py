"""The operations that SGLang's CPU path takes from the CPU build of sgl_kernel, in plain torch.

One property matters more than speed: **a row's result depends on neither its batch nor the split of its prefill**, bit
for bit, so that tokens computed behind a cached prefix can be compared with tokens computed cold. Three rules give it:

- the recurrence runs one sequence at a time, and inside it one token at a time, in float32;
- a decode step is a prefill of one token: the same function, the same shapes;
- no `torch.sigmoid`, `F.silu`, `F.softplus`: on a CPU these round differently in the vector body and in the scalar
  tail of a tensor, so a value would depend on where it lies. `exp` and `log1p` do not.

Shape alphabet: T tokens of all sequences, N sequences, C conv channels, W conv width, H / HV key / value heads, K / V
head sizes. The state pools are SGLang's: conv [slots, C, W-1], recurrent [slots, HV, V, K].
"""

import torch

from sglang_tailreplay.replay.segments import CHUNK

PADDING_SLOT = -1


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, without a weight."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# Elementwise operations of the Qwen3.5 layers ------------------------------------------------------------------------


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """Output gate of a full-attention layer: x * sigmoid(gate), both [T, heads * head_dim] (gate may be 3-D)."""
    gated = (x.float() * sigmoid(gate.float().reshape(x.shape))).to(x.dtype)
    return x.copy_(gated) if inplace else gated


def gemma_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (rms_normalize(x, eps) * (1.0 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps: float, head_dim: int):
    """Per-head norms of q and k. Returns both as [T * heads, head_dim]."""
    return (
        gemma_rmsnorm(q.reshape(-1, head_dim), q_weight, eps),
        gemma_rmsnorm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps: float, head_dim: int, num_heads: int):
    """As above; `q_gate` [T, num_heads * 2 * head_dim] holds q and the output gate of each head side by side."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """Splits the two input projections of a GDN layer: (qkv [T, C], z [T, HV, V], b [T, HV], a [T, HV])."""
    channels = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    return (
        qkvz[:, :channels].contiguous(),
        qkvz[:, channels:].reshape(-1, num_heads_v, head_v).contiguous(),
        ba[:, :num_heads_v].contiguous(),
        ba[:, num_heads_v:].contiguous(),
    )


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) and write strength beta = sigmoid(b), float32 [1, T, HV]."""
    g = -torch.exp(A_log.float()) * softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), sigmoid(b.float()).unsqueeze(0)


def rmsnorm_gated(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Output norm of a GDN layer: norm(x) * weight * silu(z), all over the last dimension."""
    normed = rms_normalize(x, eps) * weight.float()
    return (normed if z is None else normed * silu(z.float().reshape(x.shape))).to(x.dtype)


# Causal convolution --------------------------------------------------------------------------------------------------


def convolve_windows(windows, weight, bias, activation: str | bool | None) -> torch.Tensor:
    """Depthwise convolution of each token's window: windows [T, C, W], weight [C, W], bias [C]. Returns float32 [T, C].

    Separate products and sums (no convolution call, no addcmul): each is rounded once, wherever the element lies.
    """
    windows, weight = windows.float(), weight.float()
    y = windows[:, :, 0] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        y = y + windows[:, :, tap] * weight[:, tap]
    if bias is not None:
        y = y + bias.float()
    if activation in ("silu", "swish", True):
        return silu(y)
    if activation in (None, False):
        return y
    raise ValueError(f"activation must be silu, swish or none, got {activation!r}")


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    conv_states,
    query_start_loc,
    cache_indices,
    has_initial_state=None,
    activation="silu",
    pad_slot_id=PADDING_SLOT,
    seq_lens_cpu=None,
):
    """Prefill: x [C, T] holds N sequences side by side, `query_start_loc` [N+1]. Updates `conv_states` in place."""
    out = torch.zeros_like(x)
    width = weight.shape[1]
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    continued = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    for i, slot in enumerate(slots):
        rows = slice(starts[i], starts[i + 1])
        if slot == pad_slot_id or rows.start == rows.stop:
            continue
        history = conv_states[slot].to(x.dtype)
        if not continued[i]:
            history = torch.zeros_like(history)
        window = torch.cat([history, x[:, rows]], dim=1).t().contiguous()  # [W-1 + tokens, C]
        out[:, rows] = convolve_windows(window.unfold(0, width, 1), weight, bias, activation).t().to(x.dtype)
        conv_states[slot] = window[1 - width :].t().to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x,
    conv_states,
    weight,
    bias=None,
    activation=None,
    conv_state_indices=None,
    pad_slot_id=PADDING_SLOT,
    intermediate_conv_window=None,
):
    """Decode: x [N, C], one token per sequence. Updates `conv_states` in place."""
    if intermediate_conv_window is not None:
        raise NotImplementedError("speculative decoding is not supported by the CPU reference kernels")
    out = torch.zeros_like(x)
    live = (conv_state_indices != pad_slot_id).nonzero().flatten()
    slots = conv_state_indices[live].long()
    windows = torch.cat([conv_states[slots].to(x.dtype), x[live].unsqueeze(-1)], dim=-1)  # [N, C, W]
    out[live] = convolve_windows(windows, weight, bias, activation).to(x.dtype)
    conv_states[slots] = windows[:, :, 1:].to(conv_states.dtype)
    return out


# Gated delta rule ----------------------------------------------------------------------------------------------------


def delta_rule(
    q, k, v, g, beta, states, starts: list[int], slots: list[int], normalize: bool, chunk_states: list | None = None
) -> torch.Tensor:
    """N sequences side by side, each one token after the other: q, k [T, H, K], v [T, HV, V], g, beta [T, HV].

    Per token and head, in float32 and with S [V, K]:

        S' = exp(g) S       d = v - S' k       S = S' + d (beta k)^T       out = K**-0.5 * S q

    Sequence i has rows [starts[i], starts[i+1]) and slot slots[i] of the pool `states` [slots, HV, V, K], updated
    in place; a negative slot is padding. Returns out [T, HV, V] float32, zero for padding. To `chunk_states` goes the
    state [HV, V, K] float32 before every CHUNK tokens of every sequence, zero for padding.
    """
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    groups = v.shape[1] // q.shape[1]
    q = (q * q.shape[-1] ** -0.5).repeat_interleave(groups, dim=1)  # [T, HV, K]
    k = k.repeat_interleave(groups, dim=1)
    written_k = k * beta.unsqueeze(-1)

    # The loop costs what its torch calls cost, so it has only three: d and -S' q come from one product of S' with the
    # columns (k, q), and everything that does not depend on S happens before or after, for all tokens at once.
    targets = torch.stack([v, torch.zeros_like(v)], dim=-1)  # [T, HV, V, 2]
    residuals = torch.zeros_like(targets)  # [..., 0]: d, [..., 1]: -S' q
    decays = torch.exp(g)[..., None, None].unbind()
    columns = torch.stack([k, q], dim=-1).unbind()  # [HV, K, 2] each
    rows = written_k.unsqueeze(2).unbind()  # [HV, 1, K] each
    d = residuals[..., :1].unbind()
    targets, outputs = targets.unbind(), residuals.unbind()
    for start, end, slot in zip(starts, starts[1:], slots, strict=False):
        if slot < 0 or start == end:
            if chunk_states is not None:
                chunk_states += [torch.zeros(states.shape[1:])] * -(-(end - start) // CHUNK)
            continue
        state = states[slot].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for t in range(start, end):
            if chunk_states is not None and (t - start) % CHUNK == 0:
                chunk_states.append(state.clone())
            state.mul_(decays[t])
            torch.baddbmm(targets[t], state, columns[t], alpha=-1, out=outputs[t])
            state.baddbmm_(d[t], rows[t])
        states[slot] = state.to(states.dtype)
    return residuals[..., 0] * (written_k * q).sum(-1, keepdim=True) - residuals[..., 1]


def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    initial_state_indices,
    head_first=False,
    use_qk_l2norm_in_kernel=True,
):
    """Prefill: q, k [1, T, H, K], v [1, T, HV, V], g, beta [1, T, HV]. Updates the pool `initial_state` in place.

    Returns (out [1, T, HV, V], None, h [1, NC, HV, V, K]) as SGLang's kernel for a GPU does: the final states lie in
    the pool, h has the state before every chunk of CHUNK tokens of every sequence, in float32.
    """
    if head_first:
        raise NotImplementedError("head_first=True is not supported by the CPU reference kernels")
    inputs = (x[0] for x in (q, k, v, g, beta))
    starts, slots = cu_seqlens.tolist(), initial_state_indices.tolist()
    h: list[torch.Tensor] = []
    out = delta_rule(*inputs, initial_state, starts, slots, use_qk_l2norm_in_kernel, h)
    return out.to(v.dtype).unsqueeze(0), None, torch.stack(h).unsqueeze(0) if h else None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=True,
    softplus_beta=1.0,
    softplus_threshold=20.0,
    disable_state_update=False,
    **speculative,
):
    """Decode: q, k [1, N, H, K], v [1, N, HV, V], a, b [N, HV], one token per sequence. Updates the pool in place."""
    if disable_state_update or (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError("speculative decoding is not supported by the CPU reference kernels")
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    inputs = (x[0] for x in (q, k, v, g, beta))
    slots = initial_state_indices.tolist()
    starts = list(range(len(slots) + 1))
    out = delta_rule(*inputs, initial_state_source, starts, slots, use_qk_l2norm_in_kernel)
    return out.to(v.dtype).unsqueeze(0)


# Request table -------------------------------------------------------------------------------------------------------


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, row_size):
    """Writes the KV slots of new tokens into each request's row [start, end) of `req_to_token` [requests, row_size]."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


# What `torch.ops.sgl_kernel` and `sgl_kernel` offer; everything else in this file is a helper of these.
OPERATIONS = {
    function.__name__: function
    for function in (
        fused_sigmoid_mul_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_gdn_gating_cpu,
        causal_conv1d_fn_cpu,
        causal_conv1d_update_cpu,
        chunk_gated_delta_rule_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        assign_req_to_token_pool_cpu,
    )
}
