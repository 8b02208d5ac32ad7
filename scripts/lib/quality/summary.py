"""Answers to cells, cells to the paper's tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tables import markdown

from quality import intervals, paired
from quality.answers import AGAIN, COLD, FULL, SEEDED, ZERO, Answer, anchored_of, plain_of, ratio_of, tail_of
from quality.intervals import Estimate

BENCHMARKS = {"longbench": ("LongBench", "LB"), "ruler": ("RULER", "R"), "facts": ("Facts", "F")}
CUT_NAMES = {
    "question": "cut at the question: the context is cached, the question is new",
    "random": "cut at a random token of the context",
}


@dataclass(frozen=True)
class Cell:
    """The prompts of one task and length that have been answered in all of the cell's variants, in one order."""

    benchmark: str
    task: str
    length: int
    scores: Mapping[str, Sequence[float]]  # variant -> scores
    replayed: Mapping[str, float]  # variant -> share of the cached tokens that was replayed
    same: Mapping[str, Sequence[bool]]  # variant -> is the answer, token by token, that of full prefill
    same_first: Mapping[str, Sequence[bool]]  # variant -> is its first token
    seeded: Mapping[str, Sequence[bool]]  # variant -> did its replay begin at an older state

    @property
    def label(self) -> str:
        size = f"{self.length // 1024}K" if self.length % 1024 == 0 else str(self.length)
        return f"{BENCHMARKS[self.benchmark][1]}-{self.task}@{size}"

    @property
    def count(self) -> int:
        return len(next(iter(self.scores.values())))


def order(variants: Iterable[str]) -> list[str]:
    """Full, zero, plain extends, replays by ratio and by tail, seeded ones, anchored ones, full again."""

    def rank(variant: str) -> tuple[int, float]:
        if variant in (FULL, ZERO):
            return (variant == ZERO), 0
        for number, of in enumerate((plain_of, ratio_of, tail_of, anchored_of)):
            if (value := of(variant)) is not None:
                return 2 + number, value
        return (7 if variant == AGAIN else 4), math.inf

    return sorted(set(variants), key=rank)


def cells(answers: Iterable[Answer], cut: str) -> list[Cell]:
    """The cells of a cut that have a prompt with all variants of the cell; full prefill belongs to every cut."""
    grouped: dict[str, dict[str, dict[str, Answer]]] = {}
    for answer in answers:
        if answer.cut in (None, cut):
            grouped.setdefault(answer.cell, {}).setdefault(answer.prompt, {})[answer.variant] = answer
    found = []
    for name, prompts in grouped.items():
        variants = order(variant for by_variant in prompts.values() for variant in by_variant)
        whole = [by_variant for _, by_variant in sorted(prompts.items()) if len(by_variant) == len(variants)]
        if whole:
            found.append(_cell(name, variants, whole))
    at_cut = [
        cell for cell in found if not set(cell.scores) <= {*COLD}
    ]  # the others were asked at another cut, if at any
    return sorted(at_cut or found, key=lambda cell: (cell.benchmark, cell.task, cell.length))


def _cell(name: str, variants: Sequence[str], prompts: Sequence[Mapping[str, Answer]]) -> Cell:
    benchmark, _, rest = name.partition("/")
    task, _, length = rest.partition("@")
    scores = {variant: [by[variant].score for by in prompts] for variant in variants}
    shares = {
        variant: sum(by[variant].replayed / max(1, by[variant].boundary) for by in prompts) / len(prompts)
        for variant in variants
        if variant not in COLD
    }
    with_full = variants if FULL in variants else []
    same = {v: [by[v].output == by[FULL].output for by in prompts] for v in with_full}
    first = {v: [by[v].output[:1] == by[FULL].output[:1] for by in prompts] for v in with_full}
    seeded = {v: [by[v].start == SEEDED for by in prompts] for v in variants}
    return Cell(benchmark, task, int(length), scores, shares, same, first, seeded)


def estimate(chosen: Sequence[Cell], variant: str) -> Estimate:
    """Mean score of the cells, each weighing the same."""
    return intervals.mean_of_cells([cell.scores[variant] for cell in chosen])


def of_full(chosen: Sequence[Cell], variant: str) -> Estimate | None:
    """Mean score as a share of full prefill's; None without one, or where that is zero."""
    if variant == FULL or any(FULL not in cell.scores for cell in chosen):
        return None
    return intervals.ratio_of_cells([c.scores[variant] for c in chosen], [c.scores[FULL] for c in chosen])


ROUNDING = 0.9  # of the first tokens at r = 1 at least; rounding alone changes few


def problems(answers: Sequence[Answer]) -> list[str]:
    """A replay of all rows is full prefill up to rounding. If its answers are others, the server replays wrongly, and
    no number of this run means anything."""
    found = []
    exact = "r=1"
    for cut in CUT_NAMES:
        same = [one for cell in cells(answers, cut) for one in cell.same_first.get(exact, ())]
        if same and sum(same) < ROUNDING * len(same):
            found.append(
                f"cut {cut}: {exact} must give the answers of full prefill up to rounding, but only {sum(same)} of "
                f"{len(same)} begin with the same token: the replay of this server is broken"
            )
    return found


def document(answers: Sequence[Answer]) -> dict[str, Any]:
    """All numbers of the tables, and of the plot."""
    cuts = [cut for cut in CUT_NAMES if any(answer.cut == cut for answer in answers)]
    return {cut: _of_cut(answers, cut) for cut in cuts or ["question"]}


def _of_cut(answers: Sequence[Answer], cut: str) -> dict[str, Any]:
    found = cells(answers, cut)
    names = [name for name in BENCHMARKS if any(cell.benchmark == name for cell in found)]
    return {
        "benchmarks": {name: _numbers([cell for cell in found if cell.benchmark == name]) for name in names},
        "cells": {cell.label: _numbers([cell]) for cell in found},
        "paired": {name: paired.document(answers, cut, name, order) for name in names},
    }


def _numbers(chosen: Sequence[Cell]) -> dict[str, Any]:
    variants = {}
    for variant in _common(cell.scores for cell in chosen):
        share = of_full(chosen, variant)
        shares = [cell.replayed.get(variant) for cell in chosen]
        variants[variant] = {
            "score": estimate(chosen, variant)._asdict(),
            "of_full": share._asdict() if share else None,
            "replayed_share": None if variant in COLD else sum(shares) / len(shares),
            "same_as_full": _share([one for cell in chosen for one in cell.same.get(variant, ())]),
            "seeded": _share([one for cell in chosen for one in cell.seeded[variant]]),
        }
    return {"prompts": sum(cell.count for cell in chosen), "cells": len(chosen), "variants": variants}


def _common(each: Iterable[Iterable[str]]) -> list[str]:
    """The variants that all of them have."""
    return order(set.intersection(*map(set, each)))


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


# --------------------------------------------------------------------------------------------------------- tables


def tables(numbers: Mapping[str, Any], model: str) -> str:
    """Markdown: for each cut a table like the paper's Table 1, one like its Table 3, notes, and pairs by task."""
    parts = []
    for cut, found in numbers.items():
        if not found["cells"]:
            continue
        parts.append(f"## {CUT_NAMES[cut].capitalize()}")
        parts.append("Mean over the cells of a benchmark, 95% intervals; in parentheses, of full prefill.")
        parts += [table_1(found, model), "Every cell.", table_3(found, model)]
        if text := notes(found):
            parts.append(text)
        for name, pairs in found["paired"].items():
            if pairs:
                parts.append(f"{BENCHMARKS[name][0]} beside full prefill, over all prompts that both have answered.")
                parts.append(paired.table(pairs, title))
    return "\n\n".join(parts) or "No prompt has been answered in all modes yet."


def table_1(found: Mapping[str, Any], model: str) -> str:
    header, row = ["Model"], [model]
    for name, numbers in found["benchmarks"].items():
        for variant, one in numbers["variants"].items():
            header.append(f"{BENCHMARKS[name][0]} {title(variant)}")
            share = one["of_full"]
            text = _interval(one["score"])
            row.append(f"{text} ({_percent(share)})" if share else text)
    return markdown(header, [row])


def table_3(found: Mapping[str, Any], model: str) -> str:
    variants = order(v for numbers in found["cells"].values() for v in numbers["variants"])
    header = ["Model", "Cell", "n", *map(title, variants)]
    rows = [
        [model, label, numbers["prompts"], *(_score(numbers["variants"].get(v)) for v in variants)]
        for label, numbers in found["cells"].items()
    ]
    return markdown(header, rows)


def notes(found: Mapping[str, Any]) -> str:
    """What was replayed, for short prefixes are replayed by more than their share: the server has a least number of
    tokens. And how many answers are token by token those of full prefill."""
    of_cells = [numbers["variants"] for numbers in found["cells"].values()]
    said = []
    for variant in _common(of_cells):
        shares = [of[variant]["replayed_share"] for of in of_cells]
        same = [found["benchmarks"][name]["variants"][variant]["same_as_full"] for name in found["benchmarks"]]
        if variant != FULL:
            text = f"{title(variant)}: "
            text += (
                "nothing cached"
                if None in shares
                else f"{min(shares):.1%}–{max(shares):.1%} of the cached tokens replayed"
            )
            if variant == SEEDED:
                seeded = [found["benchmarks"][name]["variants"][variant]["seeded"] for name in found["benchmarks"]]
                text += f", {min(seeded):.0%} or more of them on an older state, the others on a near one or from zero"
            if None not in same:
                names = (BENCHMARKS[name][0] for name in found["benchmarks"])
                equal = ", ".join(f"{name} {share:.1%}" for name, share in zip(names, same, strict=True))
                text += f"; answers equal to full prefill's: {equal}"
            said.append(f"- {text}")
    return "\n".join(said)


def title(variant: str) -> str:
    if (ratio := ratio_of(variant)) is not None:
        return f"r={ratio * 100:g}%"
    if (ratio := plain_of(variant)) is not None:
        return f"plain {ratio * 100:g}%"
    if (interval := anchored_of(variant)) is not None:
        return f"anchored {interval}"
    return {FULL: "Full", ZERO: "Zero-only", AGAIN: "Full again", SEEDED: "Seeded"}.get(variant, variant)


def _score(one: Mapping[str, Any] | None) -> str:
    return _interval(one["score"]) if one else "-"


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _percent(one: Mapping[str, float]) -> str:
    return f"{one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]"
