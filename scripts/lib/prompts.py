"""Prompts of random tokens that share what they are meant to share. Standard library only."""

from __future__ import annotations

import random
from typing import NamedTuple


class Segment(NamedTuple):
    """`count` random tokens that depend on nothing but `seed`: equal segments are equal prefixes."""

    seed: str
    count: int


Prompt = tuple[Segment, ...]


def tokens(prompt: Prompt, vocab_size: int) -> list[int]:
    """The low ids are left out: special and byte tokens live there."""
    low = min(1000, vocab_size // 8)
    ids: list[int] = []
    for seed, count in prompt:
        draw = random.Random(seed)
        ids += [draw.randrange(low, vocab_size) for _ in range(count)]
    return ids


def prompt_len(prompt: Prompt) -> int:
    return sum(segment.count for segment in prompt)


def share(total: int, parts: int, number: int) -> int:
    """Size of part `number` (from 1) when `total` is split into `parts`."""
    return total // parts + (number <= total % parts)
