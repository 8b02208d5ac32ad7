"""Percentiles by nearest rank. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed. ValueError without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99; None without values."""
    return {f"p{p}": percentile(values, p) if values else None for p in PERCENTILES}
