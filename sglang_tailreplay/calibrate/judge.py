"""From samples to numbers, and from numbers to a recommendation. Pure: no server, no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_tailreplay.calibrate.plan import Cell, Setting, control

Z = 1.959964  # two-sided 95 %
LEAST_PROMPTS = 8  # in a cell: an interval over fewer says nothing
_NEGLIGIBLE = 1e-6  # mass of all other tokens, below what float32 log-probabilities resolve


class Sample(NamedTuple):
    """One hit, compared with the cold prefill of the same prompt at every token behind the boundary."""

    agreed: tuple[bool, ...]  # whether the most likely next token is the same
    kl: tuple[float, ...]  # nats
    replayed: int  # tokens
    exact: bool  # no approximate replay lies behind the answer


class Score(NamedTuple):
    """A cell's samples."""

    prompts: int
    positions: int
    agreement: float
    low: float  # 95 % interval
    high: float
    kl: float  # mean, nats
    kl_worst: float  # the worst prompt's mean
    replayed: float  # mean tokens
    exact: float  # share of hits


class Wanted(NamedTuple):
    agreement: float  # least share of next tokens, by the lower end of its interval
    kl: float | None  # most nats, by the mean; None: any


class Verdict(NamedTuple):
    setting: Setting | None
    reason: str


def divergence(cold: Mapping[int, float], hit: Mapping[int, float]) -> float:
    """KL(cold || hit) in nats over cold's tokens one by one and all others as one: a lower bound of the whole one.

    Log-probabilities by token; hit has all of cold's. Exact where cold has the vocabulary.
    """
    total = sum(math.exp(p) * (p - hit[token]) for token, p in cold.items())
    rest = 1 - sum(map(math.exp, cold.values()))
    if rest > _NEGLIGIBLE:
        other = 1 - sum(math.exp(hit[token]) for token in cold)
        total += rest * math.log(rest / max(other, _NEGLIGIBLE))
    return max(total, 0.0)


def score(samples: Sequence[Sample]) -> Score:
    """ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    by_prompt = [sum(one.agreed) / len(one.agreed) for one in samples]
    positions = sum(len(one.agreed) for one in samples)
    agreed = sum(sum(one.agreed) for one in samples)
    low, high = _interval(by_prompt, agreed, positions)
    kls = [sum(one.kl) / len(one.kl) for one in samples]
    return Score(
        prompts=len(samples),
        positions=positions,
        agreement=agreed / positions,
        low=low,
        high=high,
        kl=sum(kls) / len(kls),
        kl_worst=max(kls),
        replayed=sum(one.replayed for one in samples) / len(samples),
        exact=sum(one.exact for one in samples) / len(samples),
    )


def _interval(by_prompt: Sequence[float], agreed: int, positions: int) -> tuple[float, float]:
    """The wider of two on each side: Wilson's over positions, which has a width at 0 and 1, and a normal one over
    prompts, because positions of one prompt fail together."""
    share, z2 = agreed / positions, Z * Z
    centre = (share + z2 / (2 * positions)) / (1 + z2 / positions)
    half = Z / (1 + z2 / positions) * math.sqrt(share * (1 - share) / positions + z2 / (4 * positions**2))
    n = len(by_prompt)
    mean = sum(by_prompt) / n
    spread = Z * math.sqrt(sum((x - mean) ** 2 for x in by_prompt) / max(n - 1, 1) / n)
    return max(0.0, min(centre - half, share - spread)), min(1.0, max(centre + half, share + spread))


def recommend(
    settings: Sequence[Setting], lengths: Sequence[int], scores: Mapping[Cell, Score], wanted: Wanted
) -> Verdict:
    """The setting that replays least and is good enough at every length; no setting, with the reason and the way out,
    where nothing is or where a cell was not measured."""
    thin = [
        control(length) for length in lengths if (c := scores.get(control(length))) is None or c.prompts < LEAST_PROMPTS
    ]
    if thin or not lengths:
        which = f"length {thin[0].length}" if thin else "no length"
        return Verdict(
            None,
            f"{which} has fewer than {LEAST_PROMPTS} measured prompts: give longer or more prompts, or other --lengths",
        )
    noisy = min(lengths, key=lambda length: scores[control(length)].low)
    limit = scores[control(noisy)]
    if not _good(limit, wanted):
        return Verdict(
            None,
            f"even a replay of all {noisy} rows is not sure to meet it ({_told(limit)}): that is rounding on this "
            "machine, or too few prompts; raise --count, or ask for less with --agreement and --max-kl",
        )
    measured = [one for one in settings if all(_usable(scores.get(cell), one) for cell in _cells(one, lengths))]
    good = [one for one in measured if all(_good(scores[cell], wanted) for cell in _cells(one, lengths))]
    if good:
        best = min(good, key=lambda one: (_cost(one, lengths, scores), _preference(one)))
        worst = min((scores[cell] for cell in _cells(best, lengths)), key=lambda found: found.low)
        where = ", ".join(map(str, sorted(lengths)))
        return Verdict(best, f"met at {where} matched tokens, and not measured beyond; at its worst: {_told(worst)}")
    if not measured:
        return Verdict(
            None,
            "no setting was measured at every length: see the errors, give other --lengths, or --max-tokens that are "
            "sizes of the replay's graphs, such as 512 or 2048",
        )
    near = max(measured, key=lambda one: min(scores[cell].low for cell in _cells(one, lengths)))
    cell = min(_cells(near, lengths), key=lambda found: scores[found].low)
    return Verdict(
        None,
        f"no measured setting meets it; nearest is {describe(near)}, at {cell.length} tokens: {_told(scores[cell])}. "
        "Measure larger --ratios (1 is exact) or smaller --anchor-intervals, or ask for less with --agreement",
    )


def describe(setting: Setting) -> str:
    most = "" if setting.max_tokens is None else f", at most {setting.max_tokens}"
    anchors = f", anchors every {setting.anchor_interval}" if setting.anchor_interval else ", no anchors"
    return f"ratio {setting.ratio:g}, at least {setting.min_tokens} tokens{most}{anchors}"


def _cells(setting: Setting, lengths: Sequence[int]) -> list[Cell]:
    return [Cell(setting.anchor_interval, length, setting.tail(length)) for length in lengths]


def _usable(found: Score | None, setting: Setting) -> bool:
    """Whether a cell says what the setting does: replays round up to a graph's size, but never beyond a maximum, which
    the measured server has none of."""
    if found is None or found.prompts < LEAST_PROMPTS:
        return False
    return setting.max_tokens is None or found.exact == 1 or found.replayed <= setting.max_tokens


def _good(found: Score, wanted: Wanted) -> bool:
    return found.low >= wanted.agreement and (wanted.kl is None or found.kl <= wanted.kl)


def _cost(setting: Setting, lengths: Sequence[int], scores: Mapping[Cell, Score]) -> float:
    """Replayed share of the prefix, mean over lengths."""
    return sum(scores[cell].replayed / cell.length for cell in _cells(setting, lengths)) / len(lengths)


def _preference(setting: Setting) -> tuple:
    """Among settings that replay as much: no anchors, which take host memory, and no maximum, which would cut tails of
    prefixes longer than any that was measured."""
    most = setting.max_tokens or 0
    return setting.anchor_interval > 0, setting.anchor_interval, most > 0, -most, setting.ratio, setting.min_tokens


def _told(found: Score) -> str:
    return (
        f"{found.agreement:.3f} of next tokens agree (95 %: {found.low:.3f}-{found.high:.3f}, {found.prompts} "
        f"prompts), KL {found.kl:.4f}"
    )
