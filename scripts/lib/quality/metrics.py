"""Scores of one answer in [0, 1]. Standard library only.

The metrics of RULER and LongBench: a reference counts where it occurs in the answer; F1 of the words after
normalisation; ROUGE-L."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def all_found(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer contains, in any case of letters."""
    low = answer.lower()
    return sum(reference.lower() in low for reference in references) / len(references)


def any_found(answer: str, references: Sequence[str]) -> float:
    return float(any(reference.lower() in answer.lower() for reference in references))


def normalise(text: str) -> list[str]:
    """Words in lower case without punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(answer: str, references: Sequence[str]) -> float:
    return max(_f1(normalise(answer), normalise(reference)) for reference in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    return _harmonic(sum((Counter(answer) & Counter(reference)).values()), len(answer), len(reference))


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, the whole answer being one sequence."""
    words = answer.lower().split()
    return max(_rouge(words, reference.lower().split()) for reference in references)


def _rouge(answer: list[str], reference: list[str]) -> float:
    return _harmonic(longest_common(answer, reference), len(answer), len(reference))


def _harmonic(common: int, answer: int, reference: int) -> float:
    return 2 * common / (answer + reference) if common else 0.0


def longest_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def same_ids(answer: Sequence[int], references: Sequence[Sequence[int]]) -> float:
    """Share of a reference's places where the answer has the same token."""
    return max(sum(x == y for x, y in zip(answer, one, strict=False)) / len(one) for one in references)


METRICS: dict[str, Callable[[Any, Sequence[Any]], float]] = {
    "all_found": all_found,
    "any_found": any_found,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
    "same_ids": same_ids,
}
