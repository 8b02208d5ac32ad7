"""The gated delta rule over whole sequences, with a backward pass: plain torch, in chunks.

Kernels for it exist (flash-linear-attention), but their backward pass refuses some pairs of Triton and GPU. Here all is
batched matrix products, apart from one loop over chunks that hands the state on. Nothing waits for the GPU, so that a
training step can be captured as a CUDA graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T, o_t = S_t^T q_t, S_0 = 0.

    q, k: [B, T, H, K], used with length 1 (q also times K^-1/2); v: [B, T, H, V]; g, beta: [B, T, H]. All in float32
    inside. Returns [B, T, H, V] in float32."""
    return with_states(q, k, v, g, beta)[0]


def with_states(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As gated_delta_rule, and the states [B, H, N + 1, K, V] before each of the N chunks and after the last one."""
    length, keys = q.shape[1], q.shape[-1]
    q = F.normalize(q.float(), dim=-1) * keys**-0.5
    k = F.normalize(k.float(), dim=-1)
    q, k, v, g, beta = (_chunked(x.float()) for x in (q, k, v, g[..., None], beta[..., None]))
    g = g.cumsum(-2)  # [B, H, N, C, 1], as q, k, v with their own last axis
    decay = _decay(g)
    inverse = LowerInverse.apply((beta * k) @ k.mT * decay)
    corrected = inverse @ torch.cat([beta * v, beta * k * g.exp()], -1)
    u, w = corrected.split([v.shape[-1], keys], -1)
    last = g[..., -1:, :]
    written = (k * (last - g).exp()).mT
    states, deltas = _hand_on(u, w, written, last.exp())
    out = (q * g.exp()) @ states[:, :, :-1] + (q @ k.mT * decay) @ deltas
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), states


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] to [B, H, N, C, D], padded with zeros: g = beta = 0 leaves a state as it is."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)


def _decay(g: torch.Tensor) -> torch.Tensor:
    """[..., C, C]: what is left at the row's token of what the column's token wrote; 0 above the diagonal."""
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    return (g - g.mT).masked_fill(~lower, -torch.inf).exp()


def _hand_on(
    u: torch.Tensor, w: torch.Tensor, written: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States before each chunk and after the last one [B, H, N + 1, K, V], and the values that a chunk's tokens write,
    [B, H, N, C, V]."""
    batch, heads, chunks = u.shape[:3]
    u, w, written, kept = (x.flatten(0, 1).unbind(1) for x in (u, w, written, kept))
    state = u[0].new_zeros(batch * heads, w[0].shape[-1], u[0].shape[-1])
    states, deltas = [], []
    for chunk in range(chunks):
        states.append(state)
        deltas.append(torch.baddbmm(u[chunk], w[chunk], state, alpha=-1))
        state = torch.baddbmm(state * kept[chunk], written[chunk], deltas[chunk])
    states.append(state)
    return tuple(torch.stack(x, 1).unflatten(0, (batch, heads)) for x in (states, deltas))


class LowerInverse(torch.autograd.Function):
    """(I + strictly lower part of x)^-1 for x [..., C, C], C a power of two.

    Doubles the size of inverted diagonal blocks: [[A, 0], [X, B]]^-1 = [[A^-1, 0], [-B^-1 X A^-1, B^-1]]. As stable as
    substitution, unlike a product of powers of x."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        row = torch.arange(size, device=x.device)[:, None]
        column = row.mT
        inverse = torch.eye(size, device=x.device, dtype=x.dtype).expand_as(x)
        block = 1
        while block < size:
            below = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
            inverse = inverse - inverse @ (x * below) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)
