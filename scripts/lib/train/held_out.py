"""How well a model answers texts that it was not trained on: read at once, and from a cached prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from train import tasks
from train.model import Hybrid

HELD_OUT = 2  # first number of seeds; training has another one
BATCH = 32
FORMS = {name: (name, False) for name in tasks.TASKS} | {"direct": ("niah", True)}  # direct: names its subject itself
LEAST_TAIL = 64  # tokens, as a server's default
VARIANTS = {"full": None, "zero": 0.0, "r=0.05": 0.05, "r=0.1": 0.1}


@torch.no_grad()
def accuracies(model: Hybrid, lengths: Sequence[int], count: int, seed: int) -> dict[str, dict[str, dict[int, float]]]:
    """variant -> form of task -> length -> share of `count` prompts whose whole answer is the most likely one at every
    token. The prefix ends where the question begins. In this process: no server takes part."""
    found: dict[str, dict[str, dict[int, float]]] = {variant: {name: {} for name in FORMS} for variant in VARIANTS}
    for number, (name, (task, direct)) in enumerate(FORMS.items()):
        for length in lengths:
            rng = np.random.default_rng([HELD_OUT, seed, number, length])
            prompts = [tasks.asking_sample(rng, task, length, direct) for _ in range(count)]
            batches = [prompts[i : i + BATCH] for i in range(0, count, BATCH)]
            for variant, ratio in VARIANTS.items():
                found[variant][name][length] = sum(_right(model, batch, ratio) for batch in batches) / count
    return found


def _right(model: Hybrid, prompts: Sequence[tuple[np.ndarray, tasks.Question]], ratio: float | None) -> int:
    """How many of these prompts, of one task and length, are answered right."""
    ids = np.stack([np.concatenate([context, asked.question, asked.answer]) for context, asked in prompts])
    ids = torch.from_numpy(ids).to(next(model.parameters()).device)
    (boundary,) = {len(context) for context, _ in prompts}
    answer = len(prompts[0][1].answer)
    if ratio is None:
        logits = model(ids)
    else:
        tail = min(boundary, max(LEAST_TAIL, math.ceil(ratio * boundary))) if ratio else 0
        logits = model.after_replay(ids, boundary, tail)
    return int((logits[:, -answer - 1 : -1].argmax(-1) == ids[:, -answer:]).all(1).sum())
