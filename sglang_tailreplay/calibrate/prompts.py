"""Prompts of exactly so many tokens: an operator's own, or generated ones that ask for what lies far back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_tailreplay.errors import TailReplayError

GENERATED = (
    "generated: random tokens whose end repeats a passage from anywhere in them. They ask whether a hit still copies "
    "from its whole prefix; what your users ask is another question, which only --prompts FILE answers"
)
_FIRST_TOKEN = 4  # ids below are mostly special ones


def generated(boundaries: Sequence[int], suffix: int, vocab_size: int, seed: int) -> list[list[int]]:
    """A prompt [boundary + suffix] for each; a suffix repeats a passage of its prefix, one further on than the last."""
    if min(boundaries) <= suffix:
        raise ValueError(f"a prefix of {min(boundaries)} tokens has no passage of {suffix}")
    rng = random.Random(f"{seed}/{max(boundaries)}")
    found = []
    for i, length in enumerate(boundaries):
        prefix = [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length)]
        start = int((i + rng.random()) / len(boundaries) * (length - suffix))
        found.append([*prefix, *prefix[start : start + suffix]])
    return found


def read(path: Path, model_path: str) -> list[list[int]]:
    """Token ids of the prompts of a JSONL file: "input_ids", or "prompt" or "text" for the model's tokenizer."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise TailReplayError(f"--prompts {path}: cannot be read ({error})") from None
    tokenizer: Any = None
    found = []
    for number, line in enumerate(lines, 1):
        record = _record(path, number, line)
        if "input_ids" in record:
            found.append(record["input_ids"])
            continue
        if tokenizer is None:
            tokenizer = _tokenizer(model_path)
        found.append(tokenizer(record.get("prompt", record.get("text")), verbose=False)["input_ids"])
    return found


def cut(prompts: Sequence[list[int]], boundaries: Sequence[int], suffix: int) -> list[list[int]]:
    """The last boundary + suffix tokens of those that are long enough for every boundary, a prompt for each.

    The end is kept, because there a prompt asks.
    """
    long = [ids for ids in prompts if len(ids) >= max(boundaries) + suffix]
    return [ids[-(boundary + suffix) :] for ids, boundary in zip(long, boundaries, strict=False)]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        ids, text = record.get("input_ids"), record.get("prompt", record.get("text"))
        if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
            return record
        if "input_ids" not in record and isinstance(text, str):
            return record
    raise TailReplayError(
        f'--prompts {path}, line {number}: must be a JSON object with "prompt": a text, or "input_ids": token ids'
    )


def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise TailReplayError(
            f"--prompts has texts, but {model_path} brings no tokenizer ({error}); give input_ids instead"
        ) from None
