"""How well a model answers texts that it was not trained on, all of them read at once (full prefill)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from train import tasks
from train.model import Hybrid

HELD_OUT = 2  # first number of seeds; training has another one
BATCH = 32


@torch.no_grad()
def accuracies(model: Hybrid, lengths: Sequence[int], count: int, seed: int) -> dict[str, dict[int, float]]:
    """Share of `count` prompts whose whole answer is the most likely one at every token, by task and length. `direct`:
    niah, the question itself naming its subject."""
    forms = {name: (name, False) for name in tasks.TASKS} | {"direct": ("niah", True)}
    found: dict[str, dict[int, float]] = {name: {} for name in forms}
    for number, (name, (task, direct)) in enumerate(forms.items()):
        for length in lengths:
            rng = np.random.default_rng([HELD_OUT, seed, number, length])
            prompts = [tasks.asking_sample(rng, task, length, direct) for _ in range(count)]
            batches = [prompts[i : i + BATCH] for i in range(0, count, BATCH)]
            found[name][length] = sum(_right(model, batch) for batch in batches) / count
    return found


def _right(model: Hybrid, prompts: Sequence[tuple[np.ndarray, tasks.Question]]) -> int:
    """How many of these prompts, of one length, are answered right."""
    device = next(model.parameters()).device
    ids = np.stack([np.concatenate([context, asked.question, asked.answer]) for context, asked in prompts])
    ids = torch.from_numpy(ids).to(device)
    answers = torch.tensor([len(asked.answer) for _, asked in prompts], device=device)
    wrong = model(ids)[:, :-1].argmax(-1) != ids[:, 1:]
    in_answer = torch.arange(ids.shape[1] - 1, 0, -1, device=device) <= answers[:, None]
    return int((~(wrong & in_answer).any(1)).sum())
