"""A tiny random hybrid checkpoint with a byte-level tokenizer, for tests and demonstrations.

    python -m sglang_tailreplay.tiny_model DIR [--family qwen3_5] [--decay slow|fast] [--vocab 1024] [--seed 0]
        [--dtype bfloat16]

`--help` lists the families; those in _vl have a vision tower.

Random weights with default initialisation hide cache bugs: changing an early token never changes the answer. So the
decay of the recurrent states is chosen, and attention is made sharp enough that one far token matters:

- `slow`: every state depends on the whole prefix. A replay with a short tail is visibly wrong, one with r = 1 is not.
- `fast`: a state forgets half of what it holds within at most 16 tokens, as trained models do in most heads, so that a
  short tail is enough.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch

DECAYS = ("slow", "fast")
LAYERS = 8
FULL_ATTENTION_INTERVAL = 4  # layers 3 and 7 are full attention, the other six Gated DeltaNet
# Special tokens of the multimodal family, the last ids of the vocabulary.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
DECAY_PROJECTIONS = ("in_proj_a.weight", "in_proj_ba.weight", "linear_attn.a_proj.weight")

# Earlier assistant turns lose their <think> part once a user turn follows, as in the templates of reasoning models. The
# prompt of the next turn then leaves the cached conversation in the middle, not at its end.
CHAT_TEMPLATE = """\
{%- set last_user = namespace(index=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set last_user.index = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' and loop.index0 < last_user.index -%}
{%- set content = content.split('</think>')[-1].lstrip() -%}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# For contents that are lists of texts and images. The name "image" in it tells SGLang to hand lists over.
MULTIMODAL_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if 'image' in part['type'] else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


# Fields of transformers' configs. All models have 8 layers, of which 3 and 7 are full attention.
_COMMON = dict(
    hidden_act="silu",
    max_position_embeddings=16384,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    linear_conv_kernel_dim=4,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
    initializer_range=0.15,
)
_QWEN = _COMMON | dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    attn_output_gate=True,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    mamba_ssm_dtype="float32",
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    partial_rotary_factor=0.25,  # SGLang reads it here
)
_EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
# Images are positions in three dimensions, so rotary frequencies are divided among time, height and width.
_MROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
_MROPE |= dict(mrope_section=[2, 1, 1], mrope_interleaved=True)
_VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    patch_size=8,
    out_hidden_size=128,  # the text model's
    num_position_embeddings=64,
    deepstack_visual_indexes=[],  # none, as in the released models; SGLang would assume three
    initializer_range=0.15,
)
_OLMO = _COMMON | dict(
    hidden_size=96,
    intermediate_size=160,
    num_attention_heads=3,  # no power of two, as in the released model
    linear_key_head_dim=24,
    linear_value_head_dim=48,
    rope_parameters=dict(rope_type="default", rope_theta=None),  # no position embedding, in a released config's words
)


class Family(NamedTuple):
    config: str  # class of transformers
    model: str  # class of transformers
    fields: dict  # of the text model
    multimodal: str | None = None  # class of the whole config; `config` is its text part


FAMILIES = {
    "qwen3_5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN),
    "qwen3_5_vl": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForConditionalGeneration",
        _QWEN | dict(rope_parameters=_MROPE),
        "Qwen3_5Config",
    ),
    "qwen3_5_moe_vl": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForConditionalGeneration",
        _QWEN | _EXPERTS | dict(rope_parameters=_MROPE),
        "Qwen3_5MoeConfig",
    ),
    "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _QWEN | _EXPERTS),
    "qwen3_next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", _QWEN | _EXPERTS),
    "olmo_hybrid": Family("OlmoHybridConfig", "OlmoHybridForCausalLM", _OLMO),
}


def write_tiny_model(
    path: str | Path,
    decay: str = "slow",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    family: str = "qwen3_5",
    **config_overrides,
) -> Path:
    """Writes config, weights and tokenizer to folder `path` and returns it. The same arguments give the same weights.

    `config_overrides` are fields of transformers' config of the family, of its text part where there is another.
    """
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {decay!r}")
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    config = tiny_config(family, **config_overrides)
    model = _random_model(config, FAMILIES[family].model, decay, seed).to(dtype)
    model.save_pretrained(path)
    multimodal = FAMILIES[family].multimodal is not None
    tokenizer = _byte_tokenizer(config.get_text_config().vocab_size, VISION_TOKENS if multimodal else ())
    tokenizer.save_pretrained(path)
    if multimodal:
        _save_image_processor(path)
    return Path(path)


def tiny_config(family: str = "qwen3_5", **overrides):
    import transformers

    layers = overrides.get("num_hidden_layers", LAYERS)
    interval = overrides.get("full_attention_interval", FULL_ATTENTION_INTERVAL)
    fields = dict(
        vocab_size=1024,
        num_hidden_layers=layers,
        layer_types=["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)],
    )
    if family != "olmo_hybrid":
        fields["full_attention_interval"] = interval
    known = FAMILIES[family]
    text = getattr(transformers, known.config)(**known.fields | fields | overrides)
    if known.multimodal is None:
        return text
    first = text.vocab_size - len(VISION_TOKENS)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")  # as VISION_TOKENS
    ids = {name: first + i for i, name in enumerate(names)}
    # As a dictionary, from which a public checkpoint's config is made, too.
    return getattr(transformers, known.multimodal)(text_config=text.to_dict(), vision_config=_VISION, **ids)


def _random_model(config, model_class: str, decay: str, seed: int):
    import transformers

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.5)  # sharp attention
            elif name.endswith((*DECAY_PROJECTIONS, "A_log", "dt_bias")):
                _set_decay(name, parameter, decay)
    return model


def _set_decay(name: str, parameter: torch.Tensor, decay: str) -> None:
    """A token keeps exp(-exp(A_log) * softplus(a + dt_bias)) of a state, where a is a projection of the token."""
    if name.endswith(DECAY_PROJECTIONS):
        if decay == "fast":
            parameter.mul_(0.1)  # |a| stays well below dt_bias, so that the half-lives below hold for every token
    elif name.endswith("dt_bias"):
        parameter.uniform_(-4, -1) if decay == "slow" else parameter.fill_(2.0)
    elif decay == "slow":
        parameter.uniform_(-5, -2)
    else:
        half_lives = torch.empty_like(parameter, dtype=torch.float32).uniform_(2, 10)
        per_token = math.log1p(math.exp(2.0))  # softplus(dt_bias)
        parameter.copy_((math.log(2) / half_lives / per_token).log())


def _byte_tokenizer(vocab_size: int, special: tuple[str, ...] = ()):
    """One token per byte after <s> and </s>, then names without a meaning, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(names) + len(special):
        raise ValueError(f"vocab_size must be at least {len(names) + len(special)}, got {vocab_size}")
    names += [f"<unused{i}>" for i in range(len(names), vocab_size - len(special))]
    names += special
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=list(special),
        chat_template=MULTIMODAL_CHAT_TEMPLATE if special else CHAT_TEMPLATE,
    )


def _save_image_processor(path: str | Path) -> None:
    """What turns an image into patches of the vision tower: for an image of 32 x 32 pixels, 16 patches and 4 tokens."""
    from transformers import Qwen2VLImageProcessorPil

    image = Qwen2VLImageProcessorPil(patch_size=_VISION["patch_size"], min_pixels=256, max_pixels=16384)
    image.save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random hybrid checkpoint.")
    parser.add_argument("path", metavar="DIR", type=Path)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_5")
    parser.add_argument("--decay", choices=DECAYS, default="slow")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()

    # transformers looks for Triton and torchvision when it loads a model class.
    from sglang_tailreplay.cpu import activate

    if not torch.cuda.is_available():
        activate()
    path = write_tiny_model(
        options.path,
        options.decay,
        options.seed,
        getattr(torch, options.dtype),
        options.family,
        vocab_size=options.vocab,
        num_hidden_layers=options.layers,
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
