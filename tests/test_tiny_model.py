"""The tiny checkpoint: same seed, same weights; states that remember or forget; a template that drops thoughts."""

import math

import pytest
import torch
import torch.nn.functional as F

from sglang_tailreplay.cpu import activate

activate()
transformers = pytest.importorskip("transformers")

from sglang_tailreplay.tiny_model import VISION_TOKENS, write_tiny_model  # noqa: E402  (transformers must find the stand-ins)

TOKENS = 300


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        decay: write_tiny_model(tmp_path_factory.mktemp(decay), decay, dtype=torch.float32)
        for decay in ("slow", "fast")
    }


@pytest.fixture(scope="module")
def loaded(checkpoints):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return {decay: load(path, dtype=torch.float32).eval() for decay, path in checkpoints.items()}


@pytest.fixture(scope="module")
def tokenizer(checkpoints):
    return transformers.AutoTokenizer.from_pretrained(checkpoints["slow"])


def half_lives(model, ids) -> torch.Tensor:
    """Of every GDN head at every token: [layers, T, HV]."""
    hidden = model(ids, output_hidden_states=True).hidden_states
    result = []
    for layer, inputs in zip(model.model.layers, hidden, strict=False):
        if hasattr(layer, "linear_attn"):
            gdn = layer.linear_attn
            a = gdn.in_proj_a(layer.input_layernorm(inputs))[0]
            result.append(math.log(2) / (gdn.A_log.exp() * F.softplus(a + gdn.dt_bias)))
    return torch.stack(result)


def random_ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, 1024, (1, tokens), generator=torch.Generator().manual_seed(1))


def test_config_is_a_hybrid_of_six_and_two(loaded):
    config = loaded["slow"].config
    assert config.layer_types.count("linear_attention") == 6
    assert config.layer_types.count("full_attention") == 2
    assert config.max_position_embeddings == 16384


@torch.no_grad()
def test_fast_states_forget_half_within_16_tokens(loaded):
    assert half_lives(loaded["fast"], random_ids()).max() <= 16


@torch.no_grad()
def test_slow_states_remember_the_whole_prefix(loaded):
    # The slowest head of every layer still holds most of what it held TOKENS ago.
    assert half_lives(loaded["slow"], random_ids()).mean(1).amax(-1).min() > TOKENS


@torch.no_grad()
def test_an_early_token_changes_the_answer_of_a_slow_model(loaded):
    ids = random_ids()
    changed = ids.clone()
    changed[0, 3] = changed[0, 3] % 1000 + 5
    difference = (loaded["slow"](ids).logits - loaded["slow"](changed).logits)[0, -1].abs().max()
    assert difference > 0.1


def test_the_same_seed_gives_the_same_weights(checkpoints, tmp_path):
    again = write_tiny_model(tmp_path / "again", "slow", dtype=torch.float32)
    other = write_tiny_model(tmp_path / "other", "slow", seed=1, dtype=torch.float32)
    weights = [(path / "model.safetensors").read_bytes() for path in (checkpoints["slow"], again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_writing_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    write_tiny_model(tmp_path, num_hidden_layers=4)
    assert torch.equal(torch.rand(1), expected)


def test_overrides_reach_the_config(tmp_path):
    write_tiny_model(tmp_path, num_hidden_layers=4, vocab_size=512)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.vocab_size) == (4, 512)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("arguments", [dict(decay="medium"), dict(vocab_size=100)])
def test_bad_arguments_are_named(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        write_tiny_model(tmp_path, **arguments)


def test_every_text_survives_the_tokenizer(tokenizer):
    text = "def f(x):\n\treturn x + 1  # ü, 漢, \U0001f600"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_chat_with_an_image_has_its_tokens(tmp_path):
    write_tiny_model(tmp_path, family="qwen3_5_vl", num_hidden_layers=4)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    start, end, image = config.vision_start_token_id, config.vision_end_token_id, config.image_token_id
    assert tokenizer.convert_tokens_to_ids(VISION_TOKENS) == [start, end, image, config.video_token_id]
    assert max(start, end, image, config.video_token_id) < config.text_config.vocab_size
    content = [{"type": "image"}, {"type": "text", "text": "a?"}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert tokenizer.encode(rendered) == tokenizer.encode("<|user|>") + [start, image, end] + tokenizer.encode("a?\n")


def test_earlier_thoughts_are_dropped_when_the_conversation_goes_on(tokenizer):
    def render(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    turn = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nb."},
    ]
    assert "hm" in render(turn)
    longer = [*turn, {"role": "user", "content": "c?"}]
    assert render(longer) == "<|user|>a?\n<|assistant|>b.\n<|user|>c?\n<|assistant|>"
