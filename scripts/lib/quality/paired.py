"""Every mode beside full prefill, over all prompts that both have answered, and replays beside plain extends.

A run that ends early has asked some modes more prompts than others. Cells count only prompts that all modes have
answered; pairs count all that two have, and pool what single cells have too few of: by task, by length, or all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tables import markdown

from quality import intervals
from quality.answers import FULL, Answer, plain, ratio_of
from quality.intervals import Estimate

Pairs = list[tuple[Answer, Answer]]


def document(answers: Iterable[Answer], cut: str, benchmark: str, order: Callable) -> dict[str, Any]:
    """`all`, and by `tasks`, `lengths` and `cells`: variant -> numbers; `rows`: a replay's variant -> what it scores
    more than the plain extend over the same tail. Empty without full prefill."""
    by_prompt: dict[str, dict[str, Answer]] = {}
    for answer in answers:
        if answer.cut in (None, cut) and answer.cell.startswith(f"{benchmark}/"):
            by_prompt.setdefault(answer.prompt, {})[answer.variant] = answer
    prompts = [by for _, by in sorted(by_prompt.items())]
    variants = order({variant for by in prompts for variant in by})
    if FULL not in variants:
        return {}
    pairs = {variant: _pairs(prompts, variant, FULL) for variant in variants}
    extends = {variant: _pairs(prompts, variant, plain(ratio_of(variant))) for variant in variants if ratio_of(variant)}
    return {
        "all": {variant: _numbers(found) for variant, found in pairs.items() if found},
        **{name: _grouped(pairs, key) for name, key in (("tasks", _task), ("lengths", _length), ("cells", _cell))},
        "rows": {v: {"prompts": len(found), **_difference(found)} for v, found in extends.items() if found},
    }


def _pairs(prompts: Sequence[Mapping[str, Answer]], variant: str, other: str) -> Pairs:
    return [(by[variant], by[other]) for by in prompts if variant in by and other in by]


def _grouped(pairs: Mapping[str, Pairs], key: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Pairs]] = {}
    for variant, found in pairs.items():
        for pair in found:
            groups.setdefault(key(pair[0].cell), {}).setdefault(variant, []).append(pair)
    names = sorted(groups, key=lambda name: (name.partition("@")[0], len(name), name))  # 1024 before 16384
    return {name: {variant: _numbers(found) for variant, found in groups[name].items()} for name in names}


def _cell(name: str) -> str:
    return name.partition("/")[2]


def _task(name: str) -> str:
    return _cell(name).partition("@")[0]


def _length(name: str) -> str:
    return f"@{name.partition('@')[2]}"


def _numbers(pairs: Pairs) -> dict[str, Any]:
    return {
        "prompts": len(pairs),
        "score": intervals.mean([one.score for one, _ in pairs])._asdict(),
        "full": sum(full.score for _, full in pairs) / len(pairs),
        "same": sum(one.output == full.output for one, full in pairs),
        **_difference(pairs),
    }


def _difference(pairs: Pairs) -> dict[str, Any]:
    found = intervals.difference([one.score for one, _ in pairs], [other.score for _, other in pairs])
    return {"difference": found._asdict()}


def table(found: Mapping[str, Any], title: Callable[[str], str]) -> str:
    """Markdown: a mode in a row, the tasks in columns."""
    tasks = found["tasks"]
    header = ["mode", "prompts", *tasks, "all", "less full prefill", "answers equal to full prefill's"]
    rows = []
    for variant, one in found["all"].items():
        scores = [_score(tasks[task].get(variant)) for task in tasks]
        less = "" if variant == FULL else signed(Estimate(**one["difference"]))
        same = "" if variant == FULL else f"{one['same'] / one['prompts']:.1%}"
        rows.append([title(variant), one["prompts"], *scores, _score(one), less, same])
    return markdown(header, rows)


def _score(one: Mapping[str, Any] | None) -> str:
    return "-" if one is None else "{value:.2f} [{low:.2f}, {high:.2f}]".format(**one["score"])


def signed(one: Estimate) -> str:
    return f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
