"""Each operation against transformers' torch functions or its formula, and bit by bit in other splits and batches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tailreplay.cpu import kernels

HEADS_K, HEADS_V, K, V = 2, 4, 16, 32
CHANNELS, WIDTH = 2 * HEADS_K * K + HEADS_V * V, 4
LENGTHS = [1, 2, 3, 63, 64, 65, 200]


@pytest.fixture(autouse=True)
def one_seed_and_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Layer:
    """Inputs of one GDN layer for `tokens` tokens of one sequence, and pools with 4 slots."""

    def __init__(self, tokens: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.tokens = tokens
        self.x = normal(tokens, CHANNELS)
        self.weight, self.bias = normal(CHANNELS, WIDTH), normal(CHANNELS)
        self.a, self.b = normal(tokens, HEADS_V), normal(tokens, HEADS_V)
        self.A_log, self.dt_bias = normal(HEADS_V) - 3, normal(HEADS_V) - 2
        self.conv = normal(4, CHANNELS, WIDTH - 1)
        self.state = normal(4, HEADS_V, V, K)

    def split(self, x: torch.Tensor):
        q, k, v = x.split([HEADS_K * K, HEADS_K * K, HEADS_V * V], dim=-1)
        return q.view(1, -1, HEADS_K, K), k.view(1, -1, HEADS_K, K), v.view(1, -1, HEADS_V, V)

    def prefill(self, start: int, end: int, slot: int = 1) -> torch.Tensor:
        """conv, gating and delta rule of tokens [start, end), as SGLang's forward_extend calls them."""
        bounds, slots = torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
        x = kernels.causal_conv1d_fn_cpu(
            self.x[start:end].transpose(0, 1),
            self.weight,
            self.bias,
            activation="silu",
            conv_states=self.conv,
            has_initial_state=torch.tensor([start > 0]),
            cache_indices=slots,
            query_start_loc=bounds,
            seq_lens_cpu=[end - start],
        ).transpose(0, 1)
        q, k, v = self.split(x)
        g, beta = kernels.fused_gdn_gating_cpu(self.A_log, self.a[start:end], self.b[start:end], self.dt_bias)
        out, _, _ = kernels.chunk_gated_delta_rule_cpu(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=self.state,
            cu_seqlens=bounds,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=slots,
        )
        return out[0]

    def decode(self, token: int, slot: int = 1) -> torch.Tensor:
        return decode_batch([self], [token], [slot], self.conv, self.state)[0]


def decode_batch(layers, tokens, slots, conv, state) -> torch.Tensor:
    """One step for a batch; all layers share the weights of the first. Returns [N, HV, V]."""
    first, slots = layers[0], torch.tensor(slots, dtype=torch.int32)

    def rows(name):
        return torch.stack([getattr(layer, name)[token] for layer, token in zip(layers, tokens, strict=True)])

    x = kernels.causal_conv1d_update_cpu(rows("x"), conv, first.weight, first.bias, "silu", conv_state_indices=slots)
    q, k, v = first.split(x)
    out = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=first.A_log,
        dt_bias=first.dt_bias,
        q=q,
        k=k,
        v=v,
        a=rows("a"),
        b=rows("b"),
        initial_state_source=state,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(len(layers) + 1),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    return out[0]


def fresh(tokens: int, seed: int = 0) -> Layer:
    layer = Layer(tokens, seed)
    layer.state[1] = 0  # SGLang clears the slot of a new request; the conv state is covered by has_initial_state
    return layer


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Independence of split and batch -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 90), cuts=st.lists(st.integers(0, 90), max_size=5), seed=st.integers(0, 100))
def test_a_prefill_in_pieces_gives_the_bits_of_one_in_one_piece(tokens, cuts, seed):
    whole, pieces = fresh(tokens, seed), fresh(tokens, seed)
    expected = whole.prefill(0, tokens)
    bounds = sorted({0, tokens, *(cut % tokens for cut in cuts)})
    actual = torch.cat([pieces.prefill(a, b) for a, b in zip(bounds, bounds[1:], strict=False)])
    assert_same_bits(actual, expected)
    assert_same_bits(pieces.conv, whole.conv)
    assert_same_bits(pieces.state, whole.state)


@pytest.mark.parametrize("prefix", [1, 2, 3, 40])
def test_decode_steps_give_the_bits_of_a_prefill(prefix):
    whole, steps = fresh(60), fresh(60)
    expected = whole.prefill(0, 60)
    outputs = [steps.prefill(0, prefix), *(steps.decode(t)[None] for t in range(prefix, 60))]
    assert_same_bits(torch.cat(outputs), expected)
    assert_same_bits(steps.conv, whole.conv)
    assert_same_bits(steps.state, whole.state)


def test_a_row_does_not_depend_on_its_decode_batch():
    layers = [Layer(1, seed) for seed in (0, 1, 2)]
    conv, state = layers[0].conv, layers[0].state
    batch_conv, batch_state = conv.clone(), state.clone()
    together = decode_batch(layers, [0, 0, 0], [2, 0, 3], batch_conv, batch_state)
    # Weights come from the first layer in every call, so each row is decoded alone behind the first one's weights.
    for i, slot in enumerate([2, 0, 3]):
        alone_conv, alone_state = conv.clone(), state.clone()
        layers[i].weight, layers[i].bias = layers[0].weight, layers[0].bias
        layers[i].A_log, layers[i].dt_bias = layers[0].A_log, layers[0].dt_bias
        alone = decode_batch([layers[i]], [0], [slot], alone_conv, alone_state)
        assert_same_bits(together[i], alone[0])
        assert_same_bits(batch_conv[slot], alone_conv[slot])
        assert_same_bits(batch_state[slot], alone_state[slot])


def test_a_row_does_not_depend_on_its_prefill_batch():
    layer = Layer(50)
    slots, bounds = torch.tensor([3, 0]), torch.tensor([0, 17, 50])
    q, k, v = layer.split(layer.x)
    g, beta = kernels.fused_gdn_gating_cpu(layer.A_log, layer.a, layer.b, layer.dt_bias)
    together = layer.state.clone()
    out, _, _ = kernels.chunk_gated_delta_rule_cpu(q, k, v, g, beta, together, bounds, slots)
    alone = layer.state.clone()
    second = [x[:, 17:] for x in (q, k, v, g, beta)]
    expected, _, _ = kernels.chunk_gated_delta_rule_cpu(*second, alone, torch.tensor([0, 33]), torch.tensor([0]))
    assert_same_bits(out[:, 17:], expected)
    assert_same_bits(together[0], alone[0])


def test_the_states_inside_a_prefill_are_those_that_shorter_prefills_end_with():
    """Two sequences of 130 and 64 tokens side by side, then padding: three chunks of the first, one of each other."""
    layer = Layer(202)
    q, k, v = layer.split(layer.x)
    g, beta = kernels.fused_gdn_gating_cpu(layer.A_log, layer.a, layer.b, layer.dt_bias)
    inputs, before = (q, k, v, g, beta), layer.state.clone()
    bounds, slots = torch.tensor([0, 130, 194, 202]), torch.tensor([2, 0, kernels.PADDING_SLOT])
    _, _, h = kernels.chunk_gated_delta_rule_cpu(*inputs, layer.state, bounds, slots)
    assert h.shape == (1, 5, HEADS_V, V, K) and h.dtype == torch.float32
    for chunk in range(3):
        shorter = before.clone()
        part = [x[:, : 64 * chunk] for x in inputs]
        kernels.chunk_gated_delta_rule_cpu(*part, shorter, torch.tensor([0, 64 * chunk]), torch.tensor([2]))
        assert_same_bits(h[0, chunk], shorter[2])
    assert_same_bits(h[0, 3], before[0])
    assert not h[0, 4].any()


# Against other implementations ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_functions():
    from sglang_tailreplay.cpu import activate

    activate()
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_delta_rule_agrees_with_transformers(transformers_functions, form, tokens):
    layer = Layer(tokens)
    q, k, v = layer.split(layer.x)
    g, beta = kernels.fused_gdn_gating_cpu(layer.A_log, layer.a, layer.b, layer.dt_bias)
    groups = HEADS_V // HEADS_K
    expected, expected_state = getattr(transformers_functions, form)(
        q.repeat_interleave(groups, 2),
        k.repeat_interleave(groups, 2),
        v,
        g=g,
        beta=beta,
        initial_state=layer.state[2:3].transpose(-1, -2).contiguous(),  # [1, HV, K, V] there
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    actual, _, _ = kernels.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, layer.state, torch.tensor([0, tokens]), torch.tensor([2])
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.state[2], expected_state[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("continued", [False, True])
def test_convolution_agrees_with_conv1d(tokens, continued):
    layer = Layer(tokens)
    history = layer.conv[1].clone() if continued else torch.zeros(CHANNELS, WIDTH - 1)
    window = torch.cat([history, layer.x.t()], dim=1)
    expected = F.silu(F.conv1d(window[None], layer.weight[:, None], layer.bias, groups=CHANNELS)[0])
    actual = kernels.causal_conv1d_fn_cpu(
        layer.x.t(),
        layer.weight,
        layer.bias,
        layer.conv,
        query_start_loc=torch.tensor([0, tokens]),
        cache_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([continued]),
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_bits(layer.conv[1], window[:, -(WIDTH - 1) :])


def test_gating_agrees_with_its_formula():
    layer = Layer(30)
    layer.a[0] = 200.0  # beyond the threshold of softplus
    g, beta = kernels.fused_gdn_gating_cpu(layer.A_log, layer.a, layer.b, layer.dt_bias)
    torch.testing.assert_close(g[0], -layer.A_log.exp() * F.softplus(layer.a + layer.dt_bias))
    torch.testing.assert_close(beta[0], layer.b.sigmoid())


def test_gated_norm_and_output_gate_agree_with_their_formulas():
    x, z, weight = torch.randn(7, 3, 32), torch.randn(7, 3, 32), torch.randn(32)
    expected = F.rms_norm(x, (32,), weight, 1e-6) * F.silu(z)
    torch.testing.assert_close(kernels.rmsnorm_gated(x, weight, z, 1e-6), expected)
    gated = x * z.sigmoid()
    torch.testing.assert_close(kernels.fused_sigmoid_mul_cpu(x, z, inplace=True), gated)
    torch.testing.assert_close(x, gated)  # in place


def test_query_and_key_norms_split_off_the_gate():
    heads, head_dim, tokens = 4, 8, 5
    q, gate = torch.randn(tokens, heads, head_dim), torch.randn(tokens, heads, head_dim)
    k, weight = torch.randn(tokens, 2 * head_dim), torch.randn(head_dim)
    packed = torch.cat([q, gate], dim=-1).reshape(tokens, -1)
    q_out, k_out, gate_out = kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(
        packed, k, weight, weight, 1e-6, head_dim, heads
    )
    norm = F.rms_norm(q, (head_dim,), 1 + weight, 1e-6)
    torch.testing.assert_close(q_out, norm.reshape(-1, head_dim))
    torch.testing.assert_close(k_out, F.rms_norm(k.reshape(-1, head_dim), (head_dim,), 1 + weight, 1e-6))
    assert_same_bits(gate_out, gate.reshape(-1, head_dim))


def test_input_projections_are_split_in_order():
    qkvz = torch.randn(3, CHANNELS + HEADS_V * V)
    ba = torch.randn(3, 2 * HEADS_V)
    qkv, z, b, a = kernels.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, HEADS_K, HEADS_V, K, V)
    assert_same_bits(torch.cat([qkv, z.reshape(3, -1)], dim=1), qkvz)
    assert_same_bits(torch.cat([b, a], dim=1), ba)


def test_request_table_rows_are_written_between_start_and_end():
    table = torch.zeros(3, 6, dtype=torch.int32)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 6
    )
    assert table.tolist() == [[9, 0, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


# Pool rules ----------------------------------------------------------------------------------------------------------


def test_padding_and_other_slots_stay_untouched():
    layer = Layer(2)
    conv, state = layer.conv.clone(), layer.state.clone()
    out = decode_batch([layer, layer], [0, 1], [-1, 3], layer.conv, layer.state)
    assert not out[0].any()
    assert_same_bits(layer.conv[:3], conv[:3])
    assert_same_bits(layer.state[:3], state[:3])
    assert not torch.equal(layer.state[3], state[3])


def test_pools_keep_their_dtype():
    layer = Layer(5)
    layer.conv, layer.state = layer.conv.bfloat16(), layer.state.bfloat16()
    layer.prefill(0, 5)
    layer.decode(4)
    assert layer.conv.dtype == layer.state.dtype == torch.bfloat16


def test_speculative_decoding_is_refused():
    layer = Layer(1)
    with pytest.raises(NotImplementedError, match="speculative"):
        kernels.causal_conv1d_update_cpu(
            layer.x, layer.conv, layer.weight, conv_state_indices=torch.tensor([0]), intermediate_conv_window=layer.conv
        )
