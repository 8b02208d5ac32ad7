"""What a prefill takes, from a few measured times. Pure; numpy only.

    prefill of [m, n)   fixed + linear (n - m) + square (n^2 - m^2)      the square is attention
    a hit adds          replay_fixed + replay_token k                    k replayed tokens, rows included

fitted by least squares to the medians of a document of scripts/gpu_check: cold prefills of stock SGLang, hits of tail
replay. A term that comes out negative is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sglang_tailreplay.replay.tail import tail_length


@dataclass(frozen=True)
class TtftModel:
    """Milliseconds."""

    fixed: float
    linear: float
    square: float
    replay_fixed: float
    replay_token: float

    def prefill(self, matched: int, length: int) -> float:
        return self.fixed + self.linear * (length - matched) + self.square * (length**2 - matched**2)

    def replayed(self, matched: int, length: int, tail: int) -> float:
        """The same after a hit whose last `tail` tokens are replayed."""
        return self.prefill(matched, length) + (self.replay_fixed + self.replay_token * tail if matched else 0.0)


class Tail(NamedTuple):
    """Settings of tail replay."""

    ratio: float = 0.05
    min_tokens: int = 64
    max_tokens: int | None = None

    def of(self, matched: int) -> int:
        return tail_length(matched, self.ratio, self.min_tokens, self.max_tokens)


def fit(document: dict[str, Any]) -> TtftModel:
    """ValueError for a document without cold prefills of three lengths, or without hits."""
    cold = [row for row in _rows(document, "stock") if row["kind"] == "cold"]
    if len({row["prompt_tokens"] for row in cold}) < 3:
        raise ValueError("no cold prefills of three or more lengths by stock SGLang in this document")
    lengths = np.array([row["prompt_tokens"] for row in cold], float)
    times = np.array([row["ms"]["p50"] for row in cold])
    fixed, linear, square = _non_negative([lengths**0, lengths, lengths**2], times)
    base = TtftModel(fixed, linear, square, 0.0, 0.0)
    hits = [row for row in _rows(document, "tail_replay") if row["replayed"]]
    if not hits:
        raise ValueError("no hits of tail replay in this document")
    tails = np.array([row["replayed"][0] for row in hits], float)
    extra = np.array([row["ms"]["p50"] - base.prefill(row["cached"][0], row["prompt_tokens"]) for row in hits])
    replay_fixed, replay_token = _non_negative([tails**0, tails], extra)
    return TtftModel(fixed, linear, square, replay_fixed, replay_token)


def _rows(document: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    outcome = document["engines"].get(engine) or {"sections": {}}
    return (outcome["sections"].get("ttft") or {}).get("result") or []


def _non_negative(columns: Sequence[np.ndarray], values: np.ndarray) -> list[float]:
    """Least squares without the terms that come out negative."""
    used = list(range(len(columns)))
    while used:
        found, *_ = np.linalg.lstsq(np.stack([columns[i] for i in used], axis=1), values, rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(np.argmin(found)))
    terms = [0.0] * len(columns)
    for i, value in zip(used, found if used else (), strict=True):
        terms[i] = float(value)
    return terms


def queued(arrivals: Iterable[float], times_ms: Iterable[float]) -> list[float]:
    """Times to first token in ms where prefills run one at a time, first come, first served. Arrivals in seconds."""
    free, answers = 0.0, []
    for seconds, ms in zip(arrivals, times_ms, strict=True):
        free = max(free, seconds * 1e3) + ms
        answers.append(free - seconds * 1e3)
    return answers
