"""SGLang plugin of gpu_check: random weights under which every token of a prompt matters.

SGLang's dummy loader draws all weights from +-1e-3: recurrent states then forget within a few tokens and answers look
alike, so that a wrong state would not show. Here states decay slowly, attention is sharp, and logits have a spread.
"""

from __future__ import annotations

import math
from typing import Any

import torch

LOGIT_SPREAD = 3.0  # standard deviation of a logit: a few tokens hold most of the probability
NAME = "random_weights"
PLAIN_NORMS = ("OlmoHybridForCausalLM",)  # the others have SGLang's GemmaRMSNorm


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", redraw, HookType.AFTER)


@torch.no_grad()
def redraw(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After a model was loaded by the dummy loader: draw its weights anew, equal for every process and dtype."""
    if model_runner.server_args.load_format != "dummy":
        return
    tied = model_runner.model_config.hf_text_config.tie_word_embeddings
    plus_one = type(model_runner.model).__name__ not in PLAIN_NORMS
    for index, (name, weight) in enumerate(model_runner.model.named_parameters()):
        generator = torch.Generator(weight.device).manual_seed(index)
        drawn = torch.empty_like(weight, dtype=torch.bfloat16)  # the same numbers, whatever the engine's dtype
        _draw(name, drawn, generator, tied, plus_one)
        weight.copy_(drawn)


def _draw(name: str, weight: torch.Tensor, generator: torch.Generator, tied: bool, plus_one: bool) -> None:
    """`plus_one`: norms scale by 1 + w, not by w."""
    if name.endswith("A_log"):
        weight.uniform_(-5, -2, generator=generator)  # with dt_bias: states keep most of what they saw
    elif name.endswith("dt_bias"):
        weight.uniform_(-4, -1, generator=generator)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        weight.fill_(0.5 if plus_one else 1.5)  # sharper than trained models start
    elif name.endswith("linear_attn.norm.weight"):
        weight.fill_(1.0)
    elif "norm" in name:
        weight.fill_(0.0 if plus_one else 1.0)
    elif "conv" in name:
        weight.normal_(0, 0.5, generator=generator)
    elif "embed_tokens" in name:
        weight.normal_(0, LOGIT_SPREAD / math.sqrt(weight.shape[-1]) if tied else 1.0, generator=generator)
    elif "lm_head" in name:
        weight.normal_(0, LOGIT_SPREAD / math.sqrt(weight.shape[-1]), generator=generator)
    else:
        weight.normal_(0, 1 / math.sqrt(weight.shape[-1]), generator=generator)
