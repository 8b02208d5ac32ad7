"""Tiny Qwen3.5 models that remember, and their own prefill as the truth."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from sglang_tailreplay.replay.groups import EMBEDDING, find_groups
from sglang_tailreplay.replay.tail import Launch
from sglang_tailreplay.replay.torch_layers import StatePool, replay_engine

F, L = "full_attention", "linear_attention"
LAYOUTS = {
    "qwen": (L, L, L, F) * 2,
    "starts-with-FA": (F, L, L, F, L, L, L, F),
    "ends-with-GDN": (L, F, L, L, F, L, L, L),
    "consecutive-FA": (L, L, F, F, L, F, F, L),
}


class Prefill(NamedTuple):
    rows: dict[int, torch.Tensor]  # by group source: [n, d]
    conv: dict[int, torch.Tensor]  # by layer: [C, W-1]
    recurrent: dict[int, torch.Tensor]  # by layer: [HV, V, K]


@pytest.fixture(autouse=True)
def _poisoned(poisoned_empty):
    """Every test of this room runs with NaN in uninitialised memory."""


@pytest.fixture(scope="session")
def make_model() -> Callable:
    """make_model(layout="qwen", dtype=torch.float32): 8 layers, half-lives of 4 to 4096 tokens, same weights."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def make(layout="qwen", dtype=torch.float32):
        if (layout, dtype) not in made:
            torch.manual_seed(0)
            config = transformers.Qwen3_5TextConfig(
                vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=2,
                num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
                linear_key_head_dim=16, linear_value_head_dim=24, max_position_embeddings=4096,
                initializer_range=0.08, layer_types=list(LAYOUTS[layout]), pad_token_id=0, bos_token_id=None,
                eos_token_id=None,
            )  # fmt: skip
            model = transformers.Qwen3_5ForCausalLM(config).eval()
            _remember(model)
            made[layout, dtype] = model.to(dtype)
        return made[layout, dtype]

    return make


def _remember(model):
    """Half-lives log-uniform in 4..4096 tokens, and norm weights and gates that are not all alike."""
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data.normal_(std=0.2)
        if hasattr(layer, "linear_attn"):
            gdn = layer.linear_attn
            half_lives = torch.exp(torch.rand(gdn.num_v_heads) * math.log(4096 / 4) + math.log(4))
            gdn.A_log.data.zero_()
            gdn.dt_bias.data.copy_(torch.log(torch.expm1(math.log(2) / half_lives)))
            gdn.norm.weight.data.uniform_(0.5, 1.5)


@pytest.fixture(scope="session")
def prefill() -> Callable:
    """prefill(model, ids [n]) -> Prefill: transformers' own forward with what a row store would have captured."""
    transformers = pytest.importorskip("transformers")

    @torch.no_grad()
    def run(model, ids):
        rows, hooks = {}, []

        def capture(source):
            def hook(module, args, out):
                rows[source] = (out[0] if isinstance(out, tuple) else out)[0].clone()

            return hook

        for group in find_groups(model.config.layer_types):
            module = model.model.embed_tokens if group.source == EMBEDDING else model.model.layers[group.source]
            hooks.append(module.register_forward_hook(capture(group.source)))
        cache = transformers.DynamicCache(config=model.config)
        model(ids[None], past_key_values=cache, use_cache=True)
        for hook in hooks:
            hook.remove()
        conv, recurrent = {}, {}
        for i, kind in enumerate(model.config.layer_types):
            if kind == L:
                conv[i] = cache.layers[i].conv_states[0, :, 1:]  # W columns there, the oldest is never read
                recurrent[i] = cache.layers[i].recurrent_states[0].transpose(-1, -2)  # [HV, K, V] there
        return Prefill(rows, conv, recurrent)

    return run


@pytest.fixture(scope="session")
def replay() -> Callable:
    """replay(model, rows per hit [{source: [m, d]}], tails, ...) -> (pool, slots) after one engine run."""

    def run(model, hits, tails, max_tokens=10_000, skip_last_ffn=True, engine=None):
        slots = torch.tensor([3 + 2 * i for i in reversed(range(len(tails)))], dtype=torch.int32)
        conv_dtype = model.lm_head.weight.dtype
        pool = StatePool.create(model, slots=4 + 2 * len(tails), conv_dtype=conv_dtype)
        pool.clear_recurrent(slots)
        make = engine or replay_engine

        replayer = make(model, pool, max_tokens, skip_last_ffn)

        def inputs(number: int, launch: Launch) -> torch.Tensor:
            source = replayer.groups[number][0].source
            parts = []
            for piece in launch.pieces:
                rows = hits[piece.hit][source]
                parts.append(rows[len(rows) - tails[piece.hit] :][piece.start : piece.end])
            buffer = replayer.input_buffer(number, launch)
            return torch.cat(parts) if buffer is None else torch.cat(parts, out=buffer)

        replayer.run(replayer.plan(tails), slots, inputs)
        return pool, slots.tolist()

    return run


@pytest.fixture(scope="session")
def tokens() -> Callable:
    """tokens(n, seed=0): n random token ids."""
    return lambda n, seed=0: torch.randint(1, 512, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def assert_close() -> Callable:
    """assert_close(name, expected, actual, tolerance): largest error relative to the largest expected value."""

    def check(name, expected, actual, tolerance):
        assert expected.shape == actual.shape, (name, tuple(expected.shape), tuple(actual.shape))
        assert torch.isfinite(actual).all(), f"{name} is not finite"
        error = relative_error(expected, actual)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"

    return check


def relative_error(expected, actual):
    scale = expected.float().abs().max().clamp_min(1e-12)
    return ((actual.float() - expected.float()).abs().max() / scale).item()
