"""OLMo-Hybrid in SGLang: registered by the plugin, kernels with beta in (0, 2), and transformers' own numbers."""

from __future__ import annotations

import pytest
import torch

from sglang_tailreplay.replay import naive

H, K, V = 3, 8, 16


def registered(packages: str) -> dict:
    """What SGLang knows of the model once the plugin is loaded, its own cache chosen."""
    import os
    import sys

    if packages:
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = packages
    from sglang_tailreplay import plugin

    early = "sglang.srt.models.registry" in sys.modules
    plugin.register()
    plugin.register()
    from sglang.srt.configs import linear_attn_model_registry as linear
    from sglang.srt.models.registry import ModelRegistry

    spec = linear.get_linear_attn_spec_by_arch("OlmoHybridForCausalLM")
    found, architecture = ModelRegistry.resolve_model_cls(["OlmoHybridForCausalLM"])
    return {
        "model": f"{found.__module__}.{found.__name__}",
        "architecture": architecture,
        "backend": linear.import_backend_class(spec.backend_class_name).__name__,
        "specs": sum("OlmoHybridForCausalLM" in s.arch_names for s in linear._LINEAR_ATTN_MODEL_REGISTRY),
        "early": early,
    }


@pytest.mark.parametrize("packages", ["", "sglang.srt.models"], ids=["", "another-external-package"])
def test_the_plugin_registers_the_model(sandbox, packages):
    found = sandbox(registered, packages)
    assert found["model"] == "sglang_tailreplay.models.olmo_hybrid.OlmoHybridForCausalLM"
    assert found["architecture"] == "OlmoHybridForCausalLM"
    assert found["backend"] == "WideBetaGDNBackend"
    assert found["specs"] == 1


def state_shapes(path: str) -> dict:
    """Through SGLang's own reading of config.json."""
    from unittest import mock

    from sglang_tailreplay import plugin
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, family="olmo_hybrid", num_hidden_layers=4)
    plugin.register()
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.server_args import ServerArgs

    model_config = ServerArgs(model_path=path, device="cpu").get_model_config()
    config = mambaish_config(model_config)
    parallel = mock.Mock(attn_tp_size=1)
    with mock.patch("sglang.srt.runtime_context.get_parallel", lambda: parallel):
        params = config.mamba2_cache_params
    return {
        "conv": params.shape.conv,
        "temporal": params.shape.temporal,
        "layers": params.layers,
        "attention": config.full_attention_layer_ids,
        "dtype": str(params.dtype.temporal),
        "head_dim": model_config.head_dim,
        "context": model_config.context_len,
    }


def test_sglang_reads_the_states_from_the_config(sandbox, tmp_path):
    found = sandbox(state_shapes, str(tmp_path))
    assert found["temporal"] == [3, 48, 24]  # HV, V, K
    assert found["conv"] == [[2 * 72 + 144, 3]]
    assert (found["layers"], found["attention"]) == ([0, 1, 2], [3])
    assert found["dtype"] == "torch.float32"
    assert (found["head_dim"], found["context"]) == (32, 16384)


def run_kernel(lengths: list[int], decode: bool, inputs: dict) -> dict:
    """Prefill of sequences side by side, or one decode step of each after the other; float32, CPU."""
    from sglang.srt.layers.attention.linear import gdn_backend

    from sglang_tailreplay.models.wide_beta import WideBetaGDNKernel

    x = {name: torch.tensor(values) for name, values in inputs.items()}
    n = len(lengths)
    states = x.pop("states")
    slots = torch.arange(n, dtype=torch.int32)
    kernel = WideBetaGDNKernel()
    assert not kernel.supports_packed_decode
    if not decode:
        g, beta = gdn_backend.fused_gdn_gating(x["A_log"], x["a"], x["b"], x["dt_bias"])
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        where = dict(ssm_states=states, cache_indices=slots, query_start_loc=starts)
        o = kernel.extend(x["q"][None], x["k"][None], x["v"][None], g, beta, **where)[0]
        return {"o": o[0].tolist(), "states": states.tolist()}
    outputs = []
    for t in range(lengths[0]):
        rows = torch.arange(n) * lengths[0] + t
        q, k, v = (x[name][rows][None] for name in "qkv")
        o = kernel.decode(
            q, k, v, x["a"][rows], x["b"][rows], A_log=x["A_log"], dt_bias=x["dt_bias"], ssm_states=states,
            cache_indices=slots, query_start_loc=torch.arange(n + 1, dtype=torch.int32),
        )  # fmt: skip
        outputs.append(o[0])
    return {"o": torch.stack(outputs, dim=1).flatten(0, 1).tolist(), "states": states.tolist()}


def random_inputs(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        **{name: randn(tokens, H, size) for name, size in (("q", K), ("k", K), ("v", V))},
        **{name: randn(tokens, H) for name in ("a", "b")},
        "A_log": randn(H) - 3,
        "dt_bias": randn(H),
        "states": randn(len(lengths), H, V, K),
    }


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_beta_is_doubled(sandbox, decode):
    lengths = [5, 5] if decode else [1, 6, 3]
    inputs = random_inputs(lengths)
    inputs["b"] += 2  # most betas above 1, where a kernel without the factor cannot be right
    found = sandbox(run_kernel, lengths, decode, {name: x.tolist() for name, x in inputs.items()})
    g, beta = naive.gates(inputs["a"], inputs["b"], inputs["A_log"], inputs["dt_bias"], beta_scale=2.0)
    assert (beta > 1).float().mean() > 0.8
    end, expected, states = 0, [], []
    for length, state in zip(lengths, inputs["states"], strict=True):
        part = slice(end, end + length)
        end += length
        o, state = naive.gated_delta_rule(
            inputs["q"][part], inputs["k"][part], inputs["v"][part], g[part], beta[part], state
        )
        expected.append(o)
        states.append(state)
    torch.testing.assert_close(torch.tensor(found["o"]), torch.cat(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["states"]), torch.stack(states), rtol=1e-4, atol=1e-5)


def refusals() -> list[str]:
    from types import SimpleNamespace

    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    from sglang_tailreplay.models.wide_beta import _refuse_other_kernels

    class FlashInferGDNKernel:
        pass

    triton, other = TritonGDNKernel(), FlashInferGDNKernel()
    plain = dict(speculative_algorithm=None, enable_linear_replayssm=False, enable_linear_replayssm_spec=False)
    found = []
    for kernels, settings in (
        ((triton, triton), {}),
        ((other, triton), {}),
        ((triton, other), {}),
        ((triton, triton), {"speculative_algorithm": "NGRAM"}),
        ((triton, triton), {"enable_linear_replayssm": True}),
        ((triton, triton), {"enable_linear_replayssm_spec": True}),
    ):
        dispatcher = SimpleNamespace(decode_kernel=kernels[0], extend_kernel=kernels[1])
        try:
            _refuse_other_kernels(SimpleNamespace(**plain | settings), dispatcher)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_kernels_whose_beta_ends_at_one_are_refused(sandbox):
    fine, decode, prefill, speculative, *ring = sandbox(refusals)
    assert fine == ""
    assert "FlashInferGDNKernel" in decode and "--linear-attn-backend" in decode and prefill == decode
    assert "--speculative-algorithm" in speculative
    assert all("--enable-linear-replayssm" in said for said in ring)


# ---- the model against transformers, on a checkpoint that transformers wrote ----

# The released configuration; and what it has not: rotary embedding, biases, a tied head, beta in (0, 1), grouped heads.
OTHER = dict(
    rope_parameters=dict(rope_type="default", rope_theta=10000.0), attention_bias=True, tie_word_embeddings=True,
    linear_allow_neg_eigval=False, num_key_value_heads=1, linear_num_key_heads=3, linear_num_value_heads=6,
)  # fmt: skip
PIECES = [[1], [2, 3], [300], [64, 128, 192], [1, 2, 65, 66, 200]]  # ends of prefill pieces
FLOAT32 = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}


def helper():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("model", Path(__file__).with_name("model.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(path: str, overrides: dict, pieces: list[list[int]], steps: int) -> list[dict]:
    """Largest difference of a logit over a prompt prefilled in pieces, and over decoded tokens."""
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, decay="slow", dtype=torch.float32, family="olmo_hybrid", **overrides)
    tiny = helper()
    model, reference = tiny.Model(path), tiny.reference(path)
    found = []
    for ends in pieces:
        ids = tiny.random_ids(ends[-1], seed=ends[-1])
        req = model.request(ids)
        for start, end in zip([0, *ends], ends, strict=False):
            batch = model.prefill(req, start, end)
        prompt = model.logits()
        tokens = model.decode(batch, steps)
        decoded = model.logits()
        with torch.no_grad():
            expected = reference(torch.tensor([ids + tokens[:-1]])).logits[0]
        n = len(ids)
        found.append(
            {
                "prompt": float((prompt - expected[:n]).abs().max()),
                "decoded": float((decoded - expected[n:]).abs().max()),
                "greedy": tokens == expected[n - 1 :].argmax(-1).tolist(),
                "spread": float(expected.std()),
            }
        )
        model.clear()
    return found


@pytest.mark.parametrize("overrides", [{}, OTHER], ids=["released", "other"])
def test_logits_are_those_of_transformers(sandbox, tmp_path, overrides):
    for found in sandbox(compare, str(tmp_path), overrides, PIECES, 6, **FLOAT32):
        assert found["spread"] > 1
        assert found["prompt"] < 5e-4 and found["decoded"] < 5e-4
        assert found["greedy"]


def forget(path: str, what: str) -> float:
    """How much the logits of a second piece change if a state between the pieces is lost: what the test would see."""
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, decay="slow", dtype=torch.float32, family="olmo_hybrid", num_hidden_layers=4)
    tiny = helper()
    model = tiny.Model(path)
    ids = tiny.random_ids(160)
    logits = []
    for lost in (False, True):
        req = model.request(ids)
        model.prefill(req, 0, 128)
        if lost:
            cache = model.runner.req_to_token_pool.mamba_pool.mamba_cache
            pool = cache.conv[0] if what == "conv" else cache.temporal
            pool[:, int(req.mamba_pool_idx)] = 0
        model.logits()
        model.prefill(req, 128, 160)
        logits.append(model.logits())
        model.clear()
    return float((logits[0] - logits[1]).abs().max())


@pytest.mark.parametrize("what", ["conv", "recurrent"])
def test_a_lost_state_would_show(sandbox, tmp_path, what):
    assert sandbox(forget, str(tmp_path), what, **FLOAT32) > 0.1


def captured(path: str) -> dict:
    """What the first GDN layer of a group hands over, against what transformers' layer before it returns."""
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, decay="slow", dtype=torch.float32, family="olmo_hybrid")
    tiny = helper()
    model, reference = tiny.Model(path), tiny.reference(path)
    ids = tiny.random_ids(90)
    sink: list[torch.Tensor] = []
    layer = model.model.model.layers[4]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs, captured_last_layer_outputs=sink)
    model.prefill(model.request(ids), 0, len(ids))
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[4][0]
    (hidden,) = sink
    return {"difference": float((hidden - expected).abs().max()), "size": float(expected.std())}


def test_a_layer_hands_over_the_residual_stream_that_enters_it(sandbox, tmp_path):
    found = sandbox(captured, str(tmp_path), **FLOAT32)
    assert found["difference"] < 1e-4 * found["size"]


def load_broken(path: str) -> str:
    """Through SGLang's own loader."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, dtype=torch.float32, family="olmo_hybrid", num_hidden_layers=4)
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.2.linear_attn.v_conv1d.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    try:
        helper().Model(path)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_without_a_tensor_ends_the_start_with_its_name(sandbox, tmp_path):
    said = sandbox(load_broken, str(tmp_path))
    assert said == "checkpoint: 1 tensors are missing, the first is model.layers.2.linear_attn.v_conv1d.weight"
