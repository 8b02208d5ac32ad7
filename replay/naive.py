"""The gated delta rule and tail replay in plain torch, float32: the reference that faster code is compared with.

Shapes: T tokens, d hidden size, H key heads, HV value heads (a multiple of H), K key size, V value size, W kernel width
of the convolution, C = 2*H*K + HV*V channels (q, k and v of all heads, in this order).

State layout of the whole project, as in SGLang's state pool:
    conv       [slots, C, W-1]     the last W-1 inputs of the convolution, oldest first
    recurrent  [slots, HV, V, K]   V first: S[v, k]; o = S q
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from sglang_tailreplay.replay.groups import Group

Tensor = torch.Tensor


class State(NamedTuple):
    """State of one sequence in one GDN layer."""

    conv: Tensor  # [C, W-1] float32
    recurrent: Tensor  # [HV, V, K] float32


class GdnWeights(NamedTuple):
    """Weights of one GDN layer with a SwiGLU MLP, any dtype. Norm weights are factors (1 + w if a model stores w)."""

    key_heads: int
    key_size: int
    input_norm: Tensor  # [d]
    qkv: Tensor  # [C, d]
    z: Tensor  # [HV*V, d]
    b: Tensor  # [HV, d]
    a: Tensor  # [HV, d]
    conv: Tensor  # [C, W]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    norm: Tensor  # [V]
    out: Tensor  # [d, HV*V]
    post_norm: Tensor  # [d]
    gate: Tensor  # [f, d]
    up: Tensor  # [f, d]
    down: Tensor  # [d, f]
    eps: float = 1e-6
    beta_scale: float = 1.0  # 2.0 where the model allows negative eigenvalues


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then SiLU. Returns y [T, C] and the state after the last token, both float32.

    x [T, C], weight [C, W], state [C, W-1]: the W-1 inputs before x. T may be smaller than W-1. Changes no argument.
    Raises: ValueError for a kernel narrower than 2 or shapes that do not fit.
    """
    channels, width = weight.shape
    if width < 2:
        raise ValueError(f"the convolution must be at least 2 wide, got W={width}")
    if x.ndim != 2 or x.shape[1] != channels:
        raise ValueError(f"x must be [T, C={channels}], got {tuple(x.shape)}")
    if state.shape != (channels, width - 1):
        raise ValueError(f"state must be [C={channels}, W-1={width - 1}], got {tuple(state.shape)}")
    window = torch.cat([state.float(), x.float().T], dim=1)  # [C, W-1+T]
    y = F.conv1d(window[None], weight.float()[:, None], groups=channels)[0]
    return F.silu(y).T, window[:, window.shape[1] - (width - 1) :].clone()


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, beta_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log decay g <= 0 and write strength beta, both [T, HV] float32, from a, b [T, HV] and A_log, dt_bias [HV]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, beta_scale * b.float().sigmoid()


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x| over the last dimension, as the kernels round it: eps is added to the squared length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: S <- exp(g) S;  S <- S + beta (v - S k) k^T;  o = S q. Returns o [T, HV, V] and the last state.

    q, k [T, H, K] are normalised here and q is scaled by K**-0.5; v [T, HV, V]; g (log decay), beta [T, HV];
    state [HV, V, K]. Computes and returns float32. Changes no argument.
    Raises: ValueError where HV is no multiple of H or the state does not fit.
    """
    heads, value_heads = k.shape[1], v.shape[1]
    if value_heads % heads:
        raise ValueError(f"value heads (HV={value_heads}) must be a multiple of key heads (H={heads})")
    wanted = (value_heads, v.shape[2], k.shape[2])
    if state.shape != wanted:
        raise ValueError(f"state must be [HV, V, K] = {wanted}, got {tuple(state.shape)}")
    repeat = value_heads // heads
    q = (l2norm(q.float()) * q.shape[-1] ** -0.5).repeat_interleave(repeat, dim=1)
    k = l2norm(k.float()).repeat_interleave(repeat, dim=1)
    v, decay, beta, S = v.float(), g.float().exp(), beta.float(), state.float()
    o = []
    for t in range(k.shape[0]):
        S = S * decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - (S @ k[t, :, :, None])[..., 0])  # [HV, V]
        S = S + delta[:, :, None] * k[t, :, None, :]
        o.append((S @ q[t, :, :, None])[..., 0])
    return torch.stack(o) if o else v, S


def split_qkv(qkv: Tensor, key_heads: int, key_size: int, value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Channels [T, C] -> q [T, H, K], k [T, H, K], v [T, HV, V]."""
    keys = key_heads * key_size
    q, k, v = qkv.split([keys, keys, qkv.shape[1] - 2 * keys], dim=1)
    key_shape = (key_heads, key_size)
    return q.unflatten(1, key_shape), k.unflatten(1, key_shape), v.unflatten(1, (value_heads, -1))


def zero_state(w: GdnWeights) -> State:
    """The state before the first token, float32."""
    value_heads, (channels, width) = w.A_log.shape[0], w.conv.shape
    return State(
        conv=w.conv.new_zeros(channels, width - 1, dtype=torch.float32),
        recurrent=w.conv.new_zeros(value_heads, w.norm.shape[0], w.key_size, dtype=torch.float32),
    )


def gdn_layer(h: Tensor, w: GdnWeights, state: State) -> tuple[Tensor, State]:
    """One whole GDN layer in float32: h [T, d] -> h [T, d] and the state after the last token."""
    x = _rms_norm(h, w.input_norm, w.eps)
    qkv, conv = causal_conv(x @ w.qkv.float().T, w.conv, state.conv)
    g, beta = gates(x @ w.a.float().T, x @ w.b.float().T, w.A_log, w.dt_bias, w.beta_scale)
    q, k, v = split_qkv(qkv, w.key_heads, w.key_size, w.A_log.shape[0])
    o, recurrent = gated_delta_rule(q, k, v, g, beta, state.recurrent)
    z = (x @ w.z.float().T).unflatten(1, (w.A_log.shape[0], -1))
    h = h + (_rms_norm(o, w.norm, w.eps) * F.silu(z)).flatten(1) @ w.out.float().T
    x = _rms_norm(h, w.post_norm, w.eps)
    f = (F.silu(x @ w.gate.float().T) * (x @ w.up.float().T)) @ w.down.float().T
    return h + f, State(conv, recurrent)


def replay_group(h: Tensor, layers: Sequence[GdnWeights]) -> list[State]:
    """States of a group's layers after the tail h [k, d], every layer from zero. Skips nothing."""
    h = h.float()
    states = []
    for w in layers:
        h, state = gdn_layer(h, w, zero_state(w))
        states.append(state)
    return states


def replay_states(
    groups: Sequence[Group], weights: Mapping[int, GdnWeights], tails: Mapping[int, Tensor]
) -> dict[int, State]:
    """States of all GDN layers by index. `weights` by layer index; `tails` by `Group.source`: its rows [k, d]."""
    states: dict[int, State] = {}
    for group in groups:
        replayed = replay_group(tails[group.source], [weights[i] for i in group.layers])
        states.update(zip(group.layers, replayed, strict=True))
    return states


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
