import pytest
import torch
from torch.nn import functional as F

from sglang_tailreplay.replay import naive

H, HV, K, V, W = 2, 4, 8, 6, 4


def inputs(T, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v = randn(T, H, K), randn(T, H, K), randn(T, HV, V)
    g, beta = naive.gates(randn(T, HV), randn(T, HV), randn(HV), randn(HV))
    return q, k, v, g, beta, randn(HV, V, K)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 64, 500])
def test_conv_equals_a_padded_convolution(T):
    x, weight = torch.randn(T, 10), torch.randn(10, W)
    y, state = naive.causal_conv(x, weight, torch.zeros(10, W - 1))
    expected = F.silu(F.conv1d(x.T[None], weight[:, None], padding=W - 1, groups=10)[0, :, :T]).T
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(state, F.pad(x.T, (W - 1, 0))[:, -(W - 1) :])


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 63])
def test_conv_and_rule_continue_where_they_stopped(cut):
    q, k, v, g, beta, S = inputs(64)
    whole, end = naive.gated_delta_rule(q, k, v, g, beta, S)
    first, middle = naive.gated_delta_rule(q[:cut], k[:cut], v[:cut], g[:cut], beta[:cut], S)
    second, last = naive.gated_delta_rule(q[cut:], k[cut:], v[cut:], g[cut:], beta[cut:], middle)
    assert torch.equal(torch.cat([first, second]), whole) and torch.equal(last, end)

    x, weight, state = torch.randn(64, 10), torch.randn(10, W), torch.randn(10, W - 1)
    whole, end = naive.causal_conv(x, weight, state)
    first, middle = naive.causal_conv(x[:cut], weight, state)
    second, last = naive.causal_conv(x[cut:], weight, middle)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-6, rtol=1e-6)
    assert torch.equal(last, end)


def test_a_written_key_reads_back_its_value():
    q, k, v, g, _, _ = inputs(1)
    o, S = naive.gated_delta_rule(k, k, v, g, torch.ones(1, HV), torch.zeros(HV, V, K))
    torch.testing.assert_close(o * K**0.5, v, atol=1e-5, rtol=1e-5)
    assert S.shape == (HV, V, K)


def test_rule_equals_its_matrix_form():
    q, k, v, g, beta, S = inputs(20)
    _, end = naive.gated_delta_rule(q, k, v, g, beta, S)
    k = F.normalize(k, dim=-1).repeat_interleave(HV // H, dim=1)
    for t in range(20):
        for head in range(HV):
            erase = torch.eye(K) - beta[t, head] * torch.outer(k[t, head], k[t, head])
            S[head] = g[t, head].exp() * S[head] @ erase + beta[t, head] * torch.outer(v[t, head], k[t, head])
    torch.testing.assert_close(end, S, atol=1e-5, rtol=1e-5)


def test_gates_decay_and_scale():
    a, b = torch.randn(5, HV), torch.randn(5, HV)
    g, beta = naive.gates(a.bfloat16(), b.bfloat16(), torch.zeros(HV), torch.zeros(HV), beta_scale=2.0)
    assert g.dtype == beta.dtype == torch.float32
    assert (g <= 0).all() and (beta > 0).all() and (beta < 2).all() and (beta.max() > 1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: naive.causal_conv(torch.zeros(3, 5), torch.zeros(5, 1), torch.zeros(5, 0)), "W=1"),
        (lambda: naive.causal_conv(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5, 3)), "C=5"),
        (lambda: naive.causal_conv(torch.zeros(3, 5), torch.zeros(5, 4), torch.zeros(5, 4)), "W-1=3"),
        (lambda: naive.gated_delta_rule(*inputs(2)[:5], torch.zeros(HV, K, V)), "HV, V, K"),
        (lambda: naive.gated_delta_rule(*(x[:, :3] for x in inputs(2)[:5]), torch.zeros(3, V, K)), "HV=3"),
    ],
)
def test_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
