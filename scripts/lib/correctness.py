"""How far two answers lie apart, and what that says about a cache hit. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Difference(NamedTuple):
    max_abs: float  # over the log-probabilities that both answers name
    kl: float  # of the first from the second, over those tokens and one bucket for the rest
    positions: int  # new tokens compared: up to and including the first one that differs
    same_tokens: bool


Position = Mapping[int, float]  # token -> log-probability


def difference(
    tokens_a: Sequence[int], tokens_b: Sequence[int], a: Sequence[Position], b: Sequence[Position]
) -> Difference:
    """Later positions depend on the earlier tokens, so they count only while the tokens agree."""
    agree = next((i for i, (x, y) in enumerate(zip(tokens_a, tokens_b, strict=True)) if x != y), len(tokens_a))
    positions = min(agree + 1, len(a))
    pairs = [(a[i], b[i]) for i in range(positions)]
    return Difference(
        max_abs=max(_max_abs(p, q) for p, q in pairs),
        kl=max(_kl(p, q) for p, q in pairs),
        positions=positions,
        same_tokens=agree == len(tokens_a),
    )


def _common(p: Position, q: Position) -> list[int]:
    common = sorted(p.keys() & q.keys())
    if not common:
        raise ValueError("the two answers name no common token")
    return common


def _max_abs(p: Position, q: Position) -> float:
    return max(abs(p[token] - q[token]) for token in _common(p, q))


def _kl(p: Position, q: Position) -> float:
    common = _common(p, q)
    first, second = [math.exp(p[t]) for t in common], [math.exp(q[t]) for t in common]
    first.append(max(1.0 - sum(first), 1e-12))
    second.append(max(1.0 - sum(second), 1e-12))
    return sum(x * math.log(x / y) for x, y in zip(first, second, strict=True) if x > 0)


FLOOR = 1e-3  # bf16 log-probabilities near zero: below this a difference says nothing


Cases = Sequence[Mapping[str, Any]]


def judge(tail: Cases, stock: Cases, float16: Cases) -> list[dict[str, Any]]:
    """Per case at r=1 the hit must reach its boundary with a tail that is all of it. Then, on the first new token:

    float16      hit against cold prefill: within 5% of what another prefix changes
    tail_replay  hit against the float16 cold prefill: at most twice the largest error of its own cold prefills, which
                 is what rounding costs in this dtype; only where the prompt does not depend on earlier answers
    stock        only shown

    blind: a prompt with another prefix looks the same too, so agreement proves nothing."""
    truth = {case["name"]: case["cold_first"] for case in float16 if case["how"] == "prefix"}
    rows = [{**case, "engine": "stock", "error": None, "allowed": None, "verdict": "reference"} for case in stock]
    for case in float16:
        allowed = case["control_vs_cold"]["max_abs"] / 20
        rows.append({**case, "engine": "float16", **_verdict(case, case["hit_vs_cold"]["max_abs"], allowed)})
    rounding = [_max_abs(case["cold_first"], truth[case["name"]]) for case in tail if case["name"] in truth]
    allowed = max(2 * max(rounding), FLOOR) if rounding else None
    for case in tail:
        known = case["name"] in truth
        error = _max_abs(case["hit_first"], truth[case["name"]]) if known else None
        rows.append({**case, "engine": "tail_replay", **_verdict(case, error, allowed if known else None)})
    return rows


def _verdict(case: Mapping[str, Any], error: float | None, allowed: float | None) -> dict[str, Any]:
    control = case["control_vs_cold"]["max_abs"]
    blind = allowed is not None and control <= 2 * allowed
    if case["cached"] < case["matched"]:
        verdict = "SHORT HIT"
    elif case["ratio"] < 1:
        verdict = "measured"
    elif case["start"] != "exact" and (case["replayed"] is None or case["replayed"] < case["cached"]):
        verdict = "SHORT TAIL"  # an exact one began at a saved state
    elif allowed is None:
        verdict = "measured"
    elif error > allowed:
        verdict = "WRONG"
    else:
        verdict = "blind" if blind else "ok"
    return {"error": error, "allowed": allowed, "verdict": verdict}


FAILING = ("SHORT HIT", "SHORT TAIL", "WRONG")
