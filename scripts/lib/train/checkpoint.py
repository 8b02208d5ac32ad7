"""Writes a trained model as a folder that SGLang and transformers load: weights, config, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from train import vocabulary
from train.gates import half_lives
from train.model import Hybrid

# What was said, one after the other, as in training texts.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ' ' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}
"""


@torch.no_grad()
def round_weights(model: Hybrid, limit: float | None) -> None:
    """To the numbers of the checkpoint: bfloat16, and A_log in float32, so that the limit can be kept exactly."""
    for name, parameter in model.named_parameters():
        if not name.endswith("A_log"):
            parameter.copy_(parameter.bfloat16().float())
    if limit is None:
        return
    for layer in model.recurrent:
        _raise_rate(layer, limit)
        if (longest := half_lives(layer).longest.max().item()) > limit:
            raise AssertionError(f"a head may keep half of its state for {longest} tokens, the limit is {limit}")


def _raise_rate(layer: torch.nn.Module, limit: float) -> None:
    over = (half_lives(layer).longest / limit).clamp(min=1)
    layer.linear_attn.A_log.add_(over.log().to(layer.linear_attn.A_log.dtype) + 1e-6 * (over > 1))


def write(model: Hybrid, folder: Path) -> None:
    """Expects round_weights before."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (value if name.endswith("A_log") else value.bfloat16()).detach().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config, indent=1) + "\n")
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: one token per word, in any case of letters; punctuation is words of its
    own, <s> comes first."""
    words = list(vocabulary.WORDS)
    words += [f"<unused{i}>" for i in range(len(words), vocabulary.SIZE)]
    special = [
        dict(id=i, content=word, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
        for i, word in enumerate(vocabulary.SPECIAL)
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    description = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=special,
        normalizer={"type": "Lowercase"},
        pre_tokenizer={"type": "Whitespace"},
        post_processor={
            "type": "TemplateProcessing",
            "single": [begin, *text],
            "pair": [begin, *text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocabulary.BOS], "tokens": ["<s>"]}},
        },
        decoder=None,
        model={"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    )
    (folder / "tokenizer.json").write_text(json.dumps(description, indent=0) + "\n")
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
        chat_template=CHAT_TEMPLATE,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
