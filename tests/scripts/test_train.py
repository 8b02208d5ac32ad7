"""Training of small hybrids: the delta rule and its gradient, texts whose answers can be read, gates that keep their
limit, a checkpoint that transformers loads, a loop that ends in time."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sglang_tailreplay.cpu import activate

activate()
transformers = pytest.importorskip("transformers")

from train import checkpoint, gates, held_out, loader, schedule, shapes, tasks, vocabulary  # noqa: E402
from train.delta_rule import gated_delta_rule  # noqa: E402
from train.model import Hybrid  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "train_hybrid.py"
TOY = shapes.RECIPES["toy"]


# ------------------------------------------------------------------------------------------------------ delta rule


def token_by_token(q, k, v, g, beta):
    q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
    state, out = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - held))
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_chunks_and_their_gradient_are_those_of_single_tokens(length):
    draw = torch.Generator().manual_seed(length)
    q, k = torch.randn(2, 2, length, 3, 16, generator=draw, dtype=torch.float64)
    k = k + 2 * k[:, :1]  # keys that resemble each other: the system that a chunk solves is far from the identity
    v = torch.randn(2, length, 3, 8, generator=draw, dtype=torch.float64)
    g = -0.2 * torch.rand(2, length, 3, generator=draw, dtype=torch.float64)
    beta = torch.rand(2, length, 3, generator=draw, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weight = torch.randn(v.shape, generator=draw, dtype=torch.float64)
    expected, found = token_by_token(*inputs), gated_delta_rule(*inputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    for name, a, b in zip(
        ("q", "k", "v", "g", "beta"),
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-5, name


# ----------------------------------------------------------------------------------------------------------- texts


def solve(text: str) -> str:
    """The answer to the last question of a text, found by reading it."""
    words = text.split()
    codes, source, subject = {}, {}, None
    for i, word in enumerate(words):
        if words[i - 1] == "is" and words[i - 3] == "of":
            codes[words[i - 2]] = words[i : i + 2]
        elif word == "copies":
            source[words[i - 1]] = words[i + 1]
        elif word == "consider":
            subject = words[i + 1]
    end = len(words) - 1 - words[::-1].index("?")
    name = words[end - 1] if words[end - 2] in ("of", "trace") and words[end - 1] != "it" else subject
    answer = []
    while name in source:
        name = source[name]
        answer.append(name)
    return " ".join([*answer, *codes[name]])


@pytest.mark.parametrize("length", [128, 700, 4096])
@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_answer_follows_from_the_text(task, length):
    for seed in range(5):
        context, asked = tasks.asking_sample(
            np.random.default_rng(seed), task, length, direct=task == "niah" and seed > 2
        )
        assert len(context) + len(asked.question) + len(asked.answer) == length
        answer = vocabulary.text(asked.answer[:-1])
        assert solve(vocabulary.text(np.concatenate([context, asked.question]))) == answer
        assert asked.answer[-1] == vocabulary.EOS
        assert task != "vt" or len(asked.answer) == tasks.HOPS - 1 + 3  # the whole chain


def test_the_question_does_not_name_its_subject_and_the_end_of_the_context_does():
    for task in tasks.TASKS:
        for seed in range(20):
            context, asked = tasks.asking_sample(np.random.default_rng(seed), task, 256)
            assert not set(asked.question) & set(vocabulary.NAME_IDS)
            assert set(context[-held_out.LEAST_TAIL :]) & set(vocabulary.NAME_IDS)


@pytest.mark.parametrize("length", [64, 128, 1000])
def test_training_texts_have_their_length_and_mark_answers_only(length):
    rng = np.random.default_rng(3)
    for _ in range(30):
        sample = tasks.training_sample(rng, length)
        assert len(sample.ids) == len(sample.answers) == length
        assert sample.ids[0] == vocabulary.BOS
        starts = np.flatnonzero(np.diff(sample.answers.astype(int)) == 1) + 1
        assert len(starts) >= 1
        for start in starts:
            assert vocabulary.text(sample.ids[start - 2 : start]) == "answer :"
            answer = sample.ids[start : start + int(np.argmax(sample.ids[start:] == vocabulary.EOS))]
            assert solve(vocabulary.text(sample.ids[:start])) == vocabulary.text(answer)


# ----------------------------------------------------------------------------------------------------------- gates


def wild_layer(seed: int, scale: float):
    model = Hybrid(shapes.config(TOY), seed)
    layer = model.recurrent[0]
    with torch.no_grad():
        for parameter in (layer.linear_attn.in_proj_a.weight, layer.input_layernorm.weight, layer.linear_attn.dt_bias):
            parameter.normal_(std=scale)
        layer.linear_attn.A_log.normal_(-3, 2)
    return model, layer


def half_life_of(layer, x):
    a = layer.linear_attn.in_proj_a(layer.input_layernorm(x))
    return math.log(2) / (layer.linear_attn.A_log.exp() * F.softplus(a + layer.linear_attn.dt_bias))


@torch.no_grad()
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_no_input_makes_a_limited_head_remember_longer(scale):
    model, layer = wild_layer(1, scale)
    gates.limit_half_lives(model.recurrent, 64)
    checkpoint.round_weights(model, 64)
    rows = layer.linear_attn.in_proj_a.weight * (1 + layer.input_layernorm.weight)
    worst = -rows / rows.norm(dim=1, keepdim=True)  # the inputs that lower a gate the most
    inputs = torch.cat([worst, 1000 * worst, torch.randn(500, rows.shape[1])])
    longest = half_life_of(layer, inputs)
    assert longest.max() <= 64
    # The bound is not loose either: the worst input comes near it, up to the margin for rounding.
    per_head = half_life_of(layer, worst).diagonal()
    assert (per_head >= 0.8 * gates.half_lives(layer).longest).all()


def test_limits_leave_heads_alone_that_keep_them():
    model = Hybrid(shapes.config(TOY), 0)
    for layer in model.recurrent:
        gates.spread_half_lives(layer, 2, 8, torch.Generator().manual_seed(0))
        layer.linear_attn.in_proj_a.weight.data.mul_(0.1)
    before = [p.clone() for p in model.parameters()]
    gates.limit_half_lives(model.recurrent, 64)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------ checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model = Hybrid(shapes.config(TOY), 4)
    checkpoint.round_weights(model, None)
    checkpoint.write(model, folder)
    return model, folder


@torch.no_grad()
def test_transformers_loads_the_same_model(written):
    model, folder = written
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(tasks.training_sample(np.random.default_rng(0), 150).ids)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


def test_its_tokens_are_words(written):
    tokenizer = transformers.AutoTokenizer.from_pretrained(written[1])
    ids = tokenizer("The code of Ada is blue falcon. What is the code?")["input_ids"]
    assert vocabulary.text(ids) == "<s> the code of ada is blue <unk> . what is the code ?"
    for ids in (tasks.training_sample(np.random.default_rng(1), 200).ids.tolist(), list(range(len(vocabulary.WORDS)))):
        assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


def test_a_tiny_model_takes_less_than_six_megabytes(tmp_path):
    model = Hybrid(shapes.config(shapes.RECIPES["tiny"]))
    checkpoint.write(model, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5.5e6  # and then its report


# -------------------------------------------------------------------------------------------------------- training


@torch.no_grad()
def test_a_replay_of_all_rows_is_full_prefill_and_one_of_few_is_not():
    model = Hybrid(shapes.config(shapes.RECIPES["tiny"]), 0)
    for layer in model.recurrent:
        gates.spread_half_lives(layer, 500, 5000, torch.Generator().manual_seed(0))
    ids = torch.from_numpy(tasks.training_sample(np.random.default_rng(1), 150).ids)[None]
    full = model(ids)[:, 120:]
    torch.testing.assert_close(model.after_replay(ids, 120, 120), full, rtol=1e-4, atol=1e-4)
    distances = [(model.after_replay(ids, 120, tail) - full).norm() for tail in (64, 0)]
    assert 0.01 < distances[0] < distances[1]


def test_the_time_budget_says_stage_and_rate():
    stages = shapes.RECIPES["tiny"].stages
    assert sum(stage.share for stage in stages) == pytest.approx(1)
    assert [schedule.stage_at(stages, f) for f in (0, 0.0599, 0.0601, 0.999, 1.5)] == [0, 0, 1, 6, 6]
    assert schedule.rate_at(1.0, 0.1, 0) == pytest.approx(0.01)
    assert schedule.rate_at(1.0, 0.4, 1000) == 1
    assert schedule.rate_at(1.0, 0.75, 1000) == pytest.approx(0.505)
    assert schedule.rate_at(1.0, 1.2, 1000) == pytest.approx(0.01)


def test_the_same_seed_gives_the_same_batches_and_another_one_others():
    def first(seed, processes):
        made = loader.Loader(TOY.stages, seed, processes)
        try:
            return [made.next() for _ in range(4)]
        finally:
            made.close()

    once, again, other = first(1, 2), first(1, 2), first(2, 2)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(once, again, strict=True))
    assert not any(np.array_equal(a.ids, b.ids) for a, b in zip(once, other, strict=True))
    assert len({batch.ids.tobytes() for batch in once}) == 4  # no two processes make the same


def test_held_out_prompts_are_no_training_texts():
    assert held_out.HELD_OUT != loader.TRAINING


def test_a_short_training_learns_words_ends_in_time_and_writes_everything(tmp_path):
    out = tmp_path / "model"
    given = ("--size", "toy", "--seconds", "12", "--processes", "0", "--check-count", "2", "--check-lengths", "128")
    command = [sys.executable, SCRIPT, *given, "--half-life", "40", "--rate", "0.01", "--out", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((out / "training.json").read_text())
    assert report["trained_seconds"] < 12 + 10  # a step that was begun is ended
    losses = [entry["text_loss"] for e in report["history"] for entry in e["lengths"].values()]
    assert losses[0] > losses[-1] or report["steps"] < 5
    assert max(max(layer["longest"]) for layer in report["half_lives"]) <= 40
    assert set(report["held_out"]["right"]) == {"full", "zero", "r=0.05", "r=0.1"}
    names = {file.name for file in out.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "training.json"}
