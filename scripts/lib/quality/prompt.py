"""One question to a model, as token ids, and where its cached prefix may end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

CUTS = ("question", "random")


@dataclass(frozen=True)
class Prompt:
    benchmark: str
    task: str
    length: int  # tokens that prompt and answer may have together
    index: int  # within its cell, the prompts of one task and length
    ids: tuple[int, ...]
    boundary: int  # the context is ids[:boundary], the question is ids[boundary:]
    new_tokens: int  # at most; exactly, where stops is False
    references: tuple[Any, ...]  # texts, or token ids where the model has no text
    metric: str  # name in metrics.METRICS
    stops: bool = True  # at the end-of-sequence token

    def __post_init__(self) -> None:
        if not 2 <= self.boundary < len(self.ids):
            raise ValueError(f"{self.name}: boundary {self.boundary} in a prompt of {len(self.ids)} tokens")

    @property
    def cell(self) -> str:
        return f"{self.benchmark}/{self.task}@{self.length}"

    @property
    def name(self) -> str:
        return f"{self.cell}/{self.index}"

    def cut(self, where: str) -> int:
        """Tokens to serve from the cache: all before the question, or a number drawn evenly from those below it."""
        if where == "question":
            return self.boundary
        return random.Random(f"{self.digest}/cut").randrange(1, self.boundary)

    @cached_property  # it reads all of a long prompt
    def digest(self) -> str:
        """Equal for equal questions: an answer may be taken for that of another run."""
        asked = (self.ids, self.boundary, self.new_tokens, self.references, self.metric, self.stops)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


class DoesNotFit(ValueError):
    """The smallest prompt of a task is longer than the requested length."""


class Filled(NamedTuple):
    size: int
    built: Any


def fill(build: Callable[[int], Any], count: Callable[[Any], int], budget: int, most: int | None = None) -> Filled:
    """The largest build(size), 0 <= size <= most, with count(build(size)) <= budget, tokens; counts should not fall as
    sizes grow. DoesNotFit if build(0) is too long."""
    best = Filled(0, build(0))
    low, high = (0, count(best.built)), None  # size and tokens: the largest that fits, the smallest that does not
    if low[1] > budget:
        raise DoesNotFit(f"needs {low[1]} tokens, {budget} are there")
    guess, tries = 8, 0
    while low[0] != most and (high is None or high[0] - low[0] > 1):
        limits = [*([high[0] - 1] if high else ()), *([most] if most is not None else ())]
        guess = min([max(guess, low[0] + 1), *limits])
        built = build(guess)
        point = (guess, count(built))
        if point[1] > budget:
            high = point
        else:
            low, best = point, Filled(guess, built)
        tries += 1
        guess = _next_guess(low, high, budget, by_halves=tries > 8)
    return best


def _next_guess(low: tuple[int, int], high: tuple[int, int] | None, budget: int, by_halves: bool) -> int:
    """Counts grow about evenly, so the line through two known points says where the budget ends."""
    if high is None:
        return low[0] + max(1, min(3 * low[0] + 8, (budget - low[1]) * max(low[0], 1) // max(low[1], 1)))
    if by_halves:
        return (low[0] + high[0]) // 2
    return low[0] + (budget - low[1]) * (high[0] - low[0]) // (high[1] - low[1])
