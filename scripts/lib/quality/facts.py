"""The tasks that the small hybrid of this project was trained on, as prompts, from seeds that training does not use.

Only for models with that closed vocabulary: others do not know what is asked. Scores as in ruler."""

from __future__ import annotations

import numpy as np
from train import tasks, vocabulary

from quality.codec import Codec
from quality.prompt import Prompt

EVALUATION = 3  # first number of a seed; training and its own check have other ones
NEW_TOKENS = 10  # the longest answer has 6
LEAST_LENGTH = 128
# Task and whether the question itself says whom it is about.
TASKS = {"niah": ("niah", False), "niah_direct": ("niah", True), "kv": ("kv", False), "vt": ("vt", False)}


def check(codec: Codec | None, lengths: tuple[int, ...]) -> None:
    """SystemExit unless the model's tokenizer is the closed vocabulary."""
    known = codec is not None and codec.encode("the code of ada", "is ?").ids == _ids("<s> the code of ada is ?")
    if not known:
        raise SystemExit(
            "facts is for models of scripts/train_hybrid, which know its words only; for this model: --benchmarks ruler"
        )
    if short := [length for length in lengths if length < LEAST_LENGTH]:
        raise SystemExit(f"facts needs --lengths of at least {LEAST_LENGTH}, not {short[0]}")


def _ids(text: str) -> tuple[int, ...]:
    return tuple(vocabulary.ids(text).tolist())


def prompt(name: str, length: int, index: int, seed: int) -> Prompt:
    """With NEW_TOKENS it may be longer than `length`, with its answer it is not. The context ends with the subject."""
    task, direct = TASKS[name]
    rng = np.random.default_rng([EVALUATION, seed, list(TASKS).index(name), length, index])
    context, asked = tasks.asking_sample(rng, task, length, direct)
    *names, adjective, noun, _ = asked.answer
    references = (*(vocabulary.text([one]) for one in names), vocabulary.text([adjective, noun]))
    ids = tuple(np.concatenate([context, asked.question]).tolist())
    return Prompt("facts", name, length, index, ids, len(context), NEW_TOKENS, references, "all_found")
