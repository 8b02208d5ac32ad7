"""95% confidence intervals of means and of ratios of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959964  # two-sided 95%
RESAMPLES = 2000


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def wilson(successes: float, n: int) -> Estimate:
    """Share of successes in n trials, with Wilson's interval. Never empty, nor of no width at 0 or n."""
    share, z2 = successes / n, Z * Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def mean(scores: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1]: Wilson's interval where all are 0 or 1, a bootstrap's otherwise."""
    if all(score in (0, 1) for score in scores):
        return wilson(sum(scores), len(scores))
    return _estimate(float(np.mean(scores)), _resampled(scores, 0))


def mean_of_cells(cells: Sequence[Sequence[float]]) -> Estimate:
    """Mean of the cells' means. Its limits are as far from it as independent cells' limits add up to (Zou and Donner's
    method), so that cells of nothing but zeros keep an interval with a width."""
    each = [mean(cell) for cell in cells]
    value = sum(one.value for one in each) / len(each)
    below = math.hypot(*(one.value - one.low for one in each)) / len(each)
    above = math.hypot(*(one.high - one.value for one in each)) / len(each)
    return Estimate(value, value - below, value + above)


def ratio_of_cells(cells: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Estimate | None:
    """mean_of_cells(cells) / mean_of_cells(base), by a bootstrap: the i-th scores of a cell and of its base are of one
    prompt and are resampled together. None where base is zero, in the scores or in a resample."""
    for ours, theirs in zip(cells, base, strict=True):
        if len(ours) != len(theirs):
            raise ValueError(f"a ratio needs pairs, got {len(ours)} and {len(theirs)} scores")
    over = sum(_resampled(cell, number) for number, cell in enumerate(cells))
    under = sum(_resampled(cell, number) for number, cell in enumerate(base))
    if not under.min() > 0:
        return None
    value = sum(map(np.mean, cells)) / sum(map(np.mean, base))
    return _estimate(float(value), over / under)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of ours minus theirs, scores in [0, 1] of the same prompts. What is won and what is lost have Wilson's
    intervals, so that equal scores have one with a width; no prompt adds to both, which is how they are combined."""
    if len(ours) != len(theirs):
        raise ValueError(f"a difference needs pairs, got {len(ours)} and {len(theirs)} scores")
    n, changes = len(ours), [one - other for one, other in zip(ours, theirs, strict=True)]
    won, lost = (wilson(sum(max(0.0, sign * change) for change in changes), n) for sign in (1, -1))
    rest = (1 - won.value) * (1 - lost.value)
    together = 2 * math.sqrt(won.value * lost.value / rest) if rest > 0 else 0.0

    def reach(up: float, down: float) -> float:
        return math.sqrt(up * up + down * down + together * up * down)

    value = won.value - lost.value
    below = reach(won.value - won.low, lost.high - lost.value)
    return Estimate(
        value, max(-1.0, value - below), min(1.0, value + reach(won.high - won.value, lost.value - lost.low))
    )


def _resampled(scores: Sequence[float], seed: int) -> np.ndarray:
    """[RESAMPLES] means. The same seed and number of scores draw the same prompts."""
    values = np.asarray(scores, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return values[picks].mean(axis=1)


def _estimate(value: float, draws: np.ndarray) -> Estimate:
    low, high = np.percentile(draws, (2.5, 97.5))
    return Estimate(value, min(value, float(low)), max(value, float(high)))
