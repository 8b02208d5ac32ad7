"""Every family's adapter: replayed states against SGLang's own prefill, and against transformers' layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_tailreplay import adapters, compat, hooks
from sglang_tailreplay.errors import TailReplayError

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")
FLOAT32 = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
TOKENS, TAIL, MAX_TOKENS = 150, 40, 64  # the whole prompt takes three launches


def helper():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("model", Path(__file__).with_name("model.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replayed(path: str, family: str) -> dict:
    """Relative errors of the states that a replay of all rows, and of a tail, leaves in another slot."""
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, decay="slow", dtype=torch.float32, family=family)
    tiny = helper()
    runner = tiny.Model(path)
    model = adapters.find_model(runner.model)
    ids = tiny.random_ids(TOKENS)
    req = runner.request(ids)
    rows = prefill_with_rows(runner, model, req)
    truth = runner.states(req)
    reference = tiny.reference(path)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
        tail = transformers_states(reference, model.groups, torch.tensor(ids), rows, TAIL)
    return {
        "family": model.family.architectures[0],
        "row_groups": model.row_groups,
        "logits": float((runner.logits() - expected).abs().max()),
        "whole": errors(replay(runner, model, ids, rows, TOKENS), truth),
        "tail": errors(replay(runner, model, ids, rows, TAIL), tail),
        "tail_is_not_whole": errors(tail, truth),
        "no_skip": errors(replay(runner, model, ids, rows, TAIL, skip=False), tail),
    }


def prefill_with_rows(runner, model, req) -> dict[int, torch.Tensor]:
    """Row group -> [T, d], through the hook that the server installs."""
    from sglang_tailreplay import runtime

    captured: dict[int, list] = {row: [] for row in model.row_of_layer().values()}
    sinks = {layer: SimpleNamespace(append=captured[row].append) for layer, row in model.row_of_layer().items()}
    for sink in sinks.values():
        sink.copies_on_append = False
    runtime._runtime = SimpleNamespace(sink_for=sinks.get)
    hooks.install(tuple(hook for hook in hooks.SERVING if hook.function is hooks.capture_layer))
    runner.prefill(req, 0, len(req.origin_input_ids))
    runtime._runtime = SimpleNamespace(sink_for=lambda layer: None)
    return {row: torch.cat(pieces) for row, pieces in captured.items()}


def replay(runner, model, ids, rows, tail: int, skip: bool = True):
    from sglang_tailreplay.replay.engine import ReplayEngine

    engine = ReplayEngine(adapters.replay_layers(model, runner.runner), MAX_TOKENS, skip_last_ffn=skip)
    cache = runner.runner.req_to_token_pool.mamba_pool.mamba_cache
    slot = cache.temporal.shape[1] - 1
    cache.temporal[:, slot] = 0
    cache.conv[0][:, slot] = float("nan")
    sources = {group.row: rows[group.row] for group in model.groups if group.row in rows}
    tokens = torch.tensor(ids[-tail:])

    def inputs(number, launch):
        (piece,) = launch.pieces
        part = slice(piece.start, piece.end)
        group = model.groups[number]
        return model.embed(tokens[part]) if group.row not in sources else sources[group.row][-tail:][part].clone()

    with torch.no_grad():
        engine.run(engine.plan([tail]), torch.tensor([slot], dtype=torch.int32), inputs)
    return cache.conv[0][:, slot].clone(), cache.temporal[:, slot].clone()


def transformers_states(reference, groups, ids, rows, tail):
    """The same replay by transformers' own layers, each from an empty cache: conv and recurrent, in SGLang's layout."""
    conv, recurrent = [], []
    for group in groups:
        h = reference.model.embed_tokens(ids[-tail:]) if group.row not in rows else rows[group.row][-tail:]
        h = h[None]
        for index in group.layers:
            cache = empty_cache(reference)
            h = reference.model.layers[index](h, position_embeddings=None, past_key_values=cache)
            h = h[0] if isinstance(h, tuple) else h
            window, state = state_of(cache, index)
            conv.append(window[0, :, -3:])
            recurrent.append(state[0].transpose(1, 2))  # [HV, K, V] -> [HV, V, K]
    return torch.stack(conv), torch.stack(recurrent)


def empty_cache(reference):
    from transformers import DynamicCache
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    if reference.config.model_type == "olmo_hybrid":
        return modeling_olmo_hybrid.OlmoHybridDynamicCache(reference.config)
    return DynamicCache(config=reference.config)


def state_of(cache, index):
    if hasattr(cache, "layers"):
        return cache.layers[index].conv_states, cache.layers[index].recurrent_states
    streams = (cache.conv_states_q, cache.conv_states_k, cache.conv_states_v)
    return torch.cat([stream[index] for stream in streams], dim=1), cache.recurrent_states[index]


def errors(found, expected) -> list[float]:
    """Largest relative error of a layer: of the conv windows, of the recurrent states."""
    return [
        float(((a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1)).max())
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_states_are_those_of_the_prefill_and_of_transformers(sandbox, tmp_path, family):
    found = sandbox(replayed, str(tmp_path), family, **FLOAT32)
    assert found["row_groups"] == 1
    assert found["logits"] < 1e-3
    for which in ("whole", "tail", "no_skip"):
        assert max(found[which]) < 1e-4, which
    conv, recurrent = found["tail_is_not_whole"]
    assert recurrent > 0.1  # the states remember what lies before the tail


# ---- which models are known ----


class Named(torch.nn.Module):
    """A layer that says it is another class."""

    def __new__(cls, path, **attributes):
        module, name = path.rsplit(".", 1)
        layer_class = type(name, (torch.nn.Module,), {"__module__": module})
        layer = layer_class()
        for key, value in attributes.items():
            setattr(layer, key, value)
        return layer


def model_of(*layers):
    backbone = SimpleNamespace(layers=list(layers), embed_tokens=object(), config=SimpleNamespace(hidden_size=8))
    return type("SomeModel", (), {"model": backbone})()


@pytest.mark.parametrize("family", adapters.FAMILIES, ids=lambda family: family.architectures[0])
def test_a_family_is_found_by_its_layers(family):
    linear, attention = Named(family.linear_layer), Named(family.attention_layer)
    found = adapters.find_model(model_of(linear, linear, attention, linear))
    assert found.family is family
    assert [group.layers for group in found.groups] == [(0, 1), (3,)]
    assert found.row_of_layer() == {3: 0}


def test_layers_of_two_families_are_no_model():
    first, second = adapters.FAMILIES[:2]
    with pytest.raises(TailReplayError, match="SomeModel: no adapter knows its decoder layer"):
        adapters.find_model(model_of(Named(first.linear_layer), Named(second.attention_layer)))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (model_of(Named("sglang.srt.models.llama.LlamaDecoderLayer")), "sglang.srt.models.llama.LlamaDecoderLayer"),
        (model_of(), "no decoder layers"),
        (object(), "no decoder layers"),
        (model_of(Named(adapters.FAMILIES[0].linear_layer)), "no full_attention layer"),
    ],
    ids=["other-layers", "no-layers", "no-model", "no-attention"],
)
def test_an_unknown_model_is_refused_with_the_known_ones(model, why):
    with pytest.raises(TailReplayError, match=why) as error:
        adapters.find_model(model)
    assert type(model).__name__ in str(error.value)
    assert all(architecture in str(error.value) for architecture in adapters.ARCHITECTURES)


def test_every_family_is_captured():
    """A family without its hook would never hand over a row."""
    captured = {compat.target(hook.target).path for hook in hooks.SERVING if hook.function is hooks.capture_layer}
    assert captured == {f"{family.linear_layer}.forward" for family in adapters.FAMILIES}


def classes() -> list[str]:
    import pkgutil

    from sglang.srt.models.registry import ModelRegistry

    from sglang_tailreplay import plugin

    plugin.register()
    missing = []
    for family in adapters.FAMILIES:
        for path in (family.attention_layer, family.linear_layer):
            pkgutil.resolve_name(path)
        missing += [name for name in family.architectures if name not in ModelRegistry.get_supported_archs()]
    return missing


def test_every_architecture_and_layer_is_one_of_sglang(sandbox):
    assert sandbox(classes) == []
