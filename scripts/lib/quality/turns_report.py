"""Answers by turn: tables and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import markdown

from quality import intervals
from quality.answers import FULL, Answer, anchored_of, ratio_of
from quality.drift import FRESH, asked_ratio, number_of
from quality.paired import signed
from sglang_tailreplay.figure import save_figure


def document(answers: Iterable[Answer]) -> dict[str, Any]:
    """variant -> turn -> numbers, over the conversations that all variants have answered in all turns."""
    by_prompt: dict[str, dict[tuple[str, int], Answer]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.prompt, {})[answer.variant, number_of(answer.cut)] = answer
    points = {point for found in by_prompt.values() for point in found}
    whole = [found for _, found in sorted(by_prompt.items()) if found.keys() == points]
    variants = sorted({variant for variant, _ in points}, key=_order)
    turns = sorted({turn for _, turn in points})
    numbers = {v: {t: _numbers([(of[v, t], of.get((FULL, t))) for of in whole]) for t in turns} for v in variants}
    found = {"conversations": len(whole), "asked": len(by_prompt), "variants": numbers if whole else {}}
    return {**found, "built_on": _built_on(whole, variants, turns) if whole else {}}


def _built_on(whole: Sequence[Mapping], variants: Sequence[str], turns: Sequence[int]) -> dict[str, Any]:
    """variant -> turns -> what it scores more than where nothing is built on replays; saved states: than full prefill.
    A pair is a conversation, with its mean over these turns."""
    half = len(turns) // 2
    groups = [group for group in (turns[:1], turns[1:half], turns[max(1, half) :]) if group]
    found: dict[str, Any] = {}
    for variant in variants:
        other = FULL if anchored_of(variant) is not None else f"{FRESH}={ratio_of(variant) or 0:g}"
        if other in variants and other != variant:
            found[variant] = {_span(group): _difference(whole, variant, other, group)._asdict() for group in groups}
    return found


def _difference(whole: Sequence[Mapping], variant: str, other: str, turns: Sequence[int]) -> intervals.Estimate:
    ours, theirs = ([sum(of[v, t].score for t in turns) / len(turns) for of in whole] for v in (variant, other))
    return intervals.difference(ours, theirs)


def _span(turns: Sequence[int]) -> str:
    return str(turns[0]) if len(turns) == 1 else f"{turns[0]}-{turns[-1]}"


def _order(variant: str) -> tuple:
    ratio = asked_ratio(variant)
    return variant != FULL, anchored_of(variant) or 0, ratio is None, ratio or 0, variant


def _numbers(pairs: Sequence[tuple[Answer, Answer | None]]) -> dict[str, Any]:
    tasks: dict[str, list[Answer]] = {}
    for answer, _ in pairs:
        tasks.setdefault(answer.cell, []).append(answer)
    same = [answer.output == full.output for answer, full in pairs if full is not None]
    first = [answer.output[:1] == full.output[:1] for answer, full in pairs if full is not None]
    mean = {name: sum(getattr(answer, name) for answer, _ in pairs) / len(pairs) for name in ("generation", "replayed")}
    return {
        "score": intervals.mean_of_cells([[one.score for one in found] for found in tasks.values()])._asdict(),
        "tasks": {name: sum(one.score for one in found) / len(found) for name, found in sorted(tasks.items())},
        "same_as_full": intervals.mean(list(map(float, same)))._asdict() if same else None,
        "same_first": sum(first) / len(first) if first else None,
        "cached_share": sum(answer.cached / answer.tokens for answer, _ in pairs) / len(pairs),
        **mean,
    }


def tables(numbers: Mapping[str, Any]) -> str:
    variants = numbers["variants"]
    if not variants:
        return "No conversation has been answered in all ways yet."
    parts = [
        f"{numbers['conversations']} conversations, 95% intervals. Score by turn.",
        _table(variants, lambda one: _interval(one["score"])),
        "Answers that are, token by token, those of full prefill.",
        _table({v: t for v, t in variants.items() if v != FULL}, lambda one: _interval(one["same_as_full"])),
        "Approximate replays behind an answer, mean.",
        _table({v: t for v, t in variants.items() if v != FULL}, lambda one: f"{one['generation']:.1f}"),
    ]
    if built_on := numbers["built_on"]:
        parts.append("Score less that of exact only (anchored: of full prefill), by turns; a conversation is a pair.")
        spans = list(next(iter(built_on.values())))
        rows = [[title(v), *(signed(intervals.Estimate(**of[s])) for s in spans)] for v, of in built_on.items()]
        parts.append(markdown(["mode", *spans], rows))
    return "\n\n".join(parts)


def _table(variants: Mapping[str, Mapping[int, Any]], cell) -> str:
    turns = list(next(iter(variants.values())))
    return markdown(
        ["turn", *map(title, variants)], [[str(turn), *(cell(of[turn]) for of in variants.values())] for turn in turns]
    )


def title(variant: str) -> str:
    if (ratio := ratio_of(variant)) is not None:
        return f"r={ratio * 100:g}%"
    if variant.startswith(FRESH):
        return f"r={asked_ratio(variant) * 100:g}%, exact only"
    return {FULL: "Full", "zero": "Zero-only"}.get(variant, variant.replace("=", " "))


def _interval(one: Mapping[str, float] | None) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" if one else "-"


def draw(numbers: Mapping[str, Any], model: str, out: Path) -> Sequence[Path]:
    """`numbers` of document(), or read from report.json, where turns are text."""
    variants = numbers["variants"]
    if not variants:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (scores, same) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for variant, turns in variants.items():
        _line(scores, title(variant), {int(turn): one["score"] for turn, one in turns.items()})
        if variant != FULL:
            _line(same, title(variant), {int(turn): one["same_as_full"] for turn, one in turns.items()})
    scores.set(xlabel="turn", ylabel="score", ylim=(-0.02, 1.02), title="score")
    same.set(xlabel="turn", title="answers equal to full prefill's")
    for axes in (scores, same):
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=7)
    figure.suptitle(f"{model}: every turn on top of the last one")
    return save_figure(figure, out)


def _line(axes: Any, label: str, points: Mapping[int, Mapping[str, float] | None]) -> None:
    points = {turn: one for turn, one in points.items() if one}
    values = [one["value"] for one in points.values()]
    below = [one["value"] - one["low"] for one in points.values()]
    above = [one["high"] - one["value"] for one in points.values()]
    axes.errorbar(list(points), values, (below, above), marker="o", markersize=3, lw=1.2, label=label)
