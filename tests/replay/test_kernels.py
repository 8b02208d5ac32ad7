"""The Triton kernels around a GDN layer's matrix products against the naive functions.

Needs torch, triton and pytest only.
"""

import pytest
import torch
from torch.nn import functional as F

from sglang_tailreplay.replay import naive
from sglang_tailreplay.replay.segments import CHUNK, SegmentTable
from sglang_tailreplay.replay.tail import Launch, Piece

pytestmark = pytest.mark.gpu

QWEN, OLMO, SMALL = (16, 32, 128, 128), (30, 30, 96, 192), (1, 2, 12, 24)  # H, HV, K, V
BATCHES = [
    ([130, 3, 1, 64], [False, True, False, True]),
    ([2, 200], [True, True]),
    ([65], [True]),
    ([1], [False]),
    ([512], [False]),
]
W, SLOTS = 4, [5, 2, 7, 1]


class Case:
    """Random inputs of one launch: rows wider than their tensors, as a fused projection leaves them."""

    def __init__(self, lengths, continues, heads, dtype, padded):
        H, HV, K, V = heads
        torch.manual_seed(0)
        self.heads, self.lengths, self.continues, self.dtype = heads, lengths, continues, dtype
        pieces = tuple(Piece(i, 0, n, c) for i, (n, c) in enumerate(zip(lengths, continues, strict=True)))
        self.slots = SLOTS[: len(lengths)]
        table = SegmentTable(4, 20, torch.device("cuda"))
        table.load(Launch(pieces), torch.tensor(self.slots, dtype=torch.int32, device="cuda"))
        T = -(-sum(lengths) // CHUNK) * CHUNK if padded else sum(lengths)
        self.segments = table.whole(T) if padded else table.exact(Launch(pieces))
        C = 2 * H * K + HV * V
        self.qkvz = self.random(T, C + HV * V)
        self.qkv, self.z = self.qkvz[:, :C], self.qkvz[:, C:]
        self.ba = self.random(T, 2 * HV)
        self.weight, self.state = self.random(C, W), self.random(9, C, W - 1)
        self.A_log, self.dt_bias, self.norm = (torch.randn(n, device="cuda") for n in (HV, HV, V))

    def random(self, *shape):
        return torch.randn(*shape, device="cuda").to(self.dtype)

    def parts(self):
        """(tokens of the segment, slot, continues) each."""
        end = 0
        for length, slot, continues in zip(self.lengths, self.slots, self.continues, strict=True):
            yield slice(end, end + length), slot, continues
            end += length


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[QWEN, OLMO, SMALL], ids=["qwen", "olmo", "small"])
def heads(request):
    return request.param


def close(found, expected, dtype):
    """Within the rounding of the dtype: twice bfloat16's, and sums of a few float32 terms in another order."""
    expected = expected.float()
    error = (found.float() - expected).abs()
    allowed = (2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5) * expected.abs().clamp_min(1)
    assert (error <= allowed).all(), f"off by {error.max().item():.2e}"


@pytest.mark.parametrize("queries", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("lengths, continues", BATCHES)
def test_conv_heads(lengths, continues, padded, queries, heads, dtype):
    from sglang_tailreplay.replay.kernels import conv_heads

    case = Case(lengths, continues, heads, dtype, padded)
    H, HV, K, _ = heads
    before, expected_state = case.state.clone(), case.state.clone()
    q, k, v = conv_heads(case.qkv, case.weight, case.state, case.segments, heads, queries)
    assert (q is not None) == queries
    for part, slot, goes_on in case.parts():
        window = before[slot] if goes_on else torch.zeros_like(before[slot])
        y, state = naive.causal_conv(case.qkv[part], case.weight, window)
        expected_q, expected_k, expected_v = naive.split_qkv(y.to(dtype), H, K, HV)
        close(k[part], naive.l2norm(expected_k.float()), dtype)
        close(v[part], expected_v, dtype)
        if queries:
            close(q[part], naive.l2norm(expected_q.float()), dtype)
        expected_state[slot] = state.to(dtype)
    assert torch.equal(case.state, expected_state), "exactly the last inputs of every segment, and no other slot"


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("lengths, continues", BATCHES)
def test_gates(lengths, continues, padded, heads, dtype):
    from sglang_tailreplay.replay.kernels import gates

    case = Case(lengths, continues, heads, dtype, padded)
    b, a = case.ba.chunk(2, dim=1)
    g, beta = gates(b, a, case.A_log, case.dt_bias, case.segments, beta_scale=2.0)
    for part, *_ in case.parts():
        decay, expected_beta = naive.gates(a[part], b[part], case.A_log, case.dt_bias, beta_scale=2.0)
        sums = torch.cat([chunk.cumsum(0) for chunk in decay.split(CHUNK)])
        torch.testing.assert_close(g[0, part], sums, rtol=1e-4, atol=1e-4)
        close(beta[0, part], expected_beta, dtype)


@pytest.mark.parametrize("sigmoid", [True, False])
def test_gated_norm(sigmoid, heads, dtype):
    from sglang_tailreplay.replay.kernels import gated_norm

    case = Case([77], [False], heads, dtype, padded=False)
    _, HV, _, V = heads
    o = case.random(77, HV, V)
    y = gated_norm(o, case.z, case.norm, 1e-6, sigmoid)
    z = case.z.float().unflatten(1, (HV, V))
    normed = F.rms_norm(o.float(), (V,), case.norm.float(), 1e-6)
    close(y, (normed * (z.sigmoid() if sigmoid else F.silu(z))).flatten(1), dtype)
