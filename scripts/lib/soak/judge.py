"""What is wrong with what a server did. Pure: outcomes and samples in, failures out."""

from __future__ import annotations

import bisect
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from soak.plan import ENDS, REFUSED, Kind, Request

TIE = 1e-3  # float32: two tokens whose log-probabilities are as close as this are both right


class Failure(NamedTuple):
    what: str  # a word to count by
    text: str
    step: int | None = None
    prompt: tuple[int, ...] | None = None  # kept for what a seed may not reproduce: answers in bfloat16 can vary


@dataclass(frozen=True)
class Outcome:
    """What the client saw of one request."""

    status: int | None  # None: no response
    seconds: float
    message: str = ""  # of a refusal, or what broke the connection
    tokens: tuple[int, ...] = ()
    cached: int = 0
    generation: int | None = None  # None: no hit, or a server without tail replay
    retractions: int = 0
    finish: str = ""  # length, stop, abort; empty if the answer's end was not seen
    # Per new token, best first: the chosen one's is in `chosen`. None: not asked for. NaN: not a number at the server.
    top: tuple[dict[int, float], ...] | None = None
    chosen: tuple[float, ...] | None = None

    @property
    def first_lost(self) -> bool:
        """SGLang 0.5.17, with or without tail replay, forgets the first token's log-probabilities of a request that is
        retracted between its prefill and that token: its output streamer counts one of none as sent. Mended by SGLang's
        pull request 26510."""
        return self.retractions > 0 and self.top is not None and len(self.top) == len(self.tokens) - 1


class Sent:
    """Every text of earlier rounds since the last flush at a quiet moment: what a cache may know."""

    def __init__(self):
        self._texts: list[bytes] = []  # sorted: the longest common prefix is that with a neighbour
        self._open: dict[bytes, int] = {}  # prompt -> tokens that the server may have added without our seeing them

    def clear(self) -> None:
        self._texts.clear()
        self._open.clear()

    def add(self, tokens: Sequence[int], unseen: int = 0) -> None:
        text = _bytes(tokens)
        at = bisect.bisect_left(self._texts, text)
        if at == len(self._texts) or self._texts[at] != text:
            self._texts.insert(at, text)
        if unseen:
            self._open[text] = max(unseen, self._open.get(text, 0))

    def longest(self, prompt: Sequence[int]) -> int:
        """The most tokens of `prompt` that a cache can have."""
        text = _bytes(prompt)
        at = bisect.bisect_left(self._texts, text)
        best = max((_common(text, other) for other in self._texts[max(0, at - 1) : at + 1]), default=0)
        for length in {len(key) for key in self._open}:
            if length <= len(text) and (unseen := self._open.get(text[:length])):
                best = max(best, length // 4 + unseen)
        return best


class Text(NamedTuple):
    """One request of a round that is over."""

    prompt: Sequence[int]
    answer: Sequence[int]
    unseen: int  # tokens that may follow what is known: of an answer that was cut
    rematched: bool = False  # it may have been retracted and have found what it had computed itself


def possible_hits(sent: Sent, texts: Sequence[Text]) -> list[int]:
    """For each text of a round: the most prompt tokens that the cache can have had, from earlier rounds or from the
    others of its round. Never the last one, which must be computed."""
    whole = [_bytes([*t.prompt, *t.answer]) for t in texts]
    found = []
    for i, own in enumerate(texts):
        prompt, best = _bytes(own.prompt), sent.longest(own.prompt)
        for j, other in enumerate(texts):
            if i != j:
                common = _common(prompt, whole[j])
                best = max(best, common + (other.unseen if 4 * common == len(whole[j]) else 0))
        found.append(len(own.prompt) - 1 if own.rematched else min(best, len(own.prompt) - 1))
    return found


def _bytes(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()  # so that bytes sort as tokens do
    return words.tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:  # slices compare at memory speed, tokens one by one do not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: 4 * middle] == b[: 4 * middle] else (low, middle - 1)
    return low


def judge(request: Request, prompt: Sequence[int], outcome: Outcome, possible: int) -> Iterator[Failure]:
    """Failures of one request on its own. `possible`: of possible_hits."""

    def failure(what: str, text: str) -> Failure:
        kept = tuple(prompt) if request.kind is not Kind.TOO_LONG else None
        return Failure(what, f"{request.kind} of {len(prompt)} tokens: {text}", request.step, kept)

    status = outcome.status
    if request.kind in REFUSED:
        if status is None or not 400 <= status < 500 or not outcome.message:
            yield failure("not-refused", f"status {status} {outcome.message!r}, must be 4xx with a message")
        return
    if status is None and request.kind is not Kind.DISCONNECT:
        yield failure("no-answer", outcome.message)
    if status is not None and status >= 400:
        yield failure("refused" if status < 500 else "5xx", f"status {status}: {outcome.message}")
    if status != 200:
        return
    if outcome.cached > possible:
        yield failure("cached-too-much", f"{outcome.cached} tokens from the cache, {possible} were sent before")
    if request.kind in ENDS and (outcome.finish != "length" or len(outcome.tokens) != request.max_new):
        got = f"{len(outcome.tokens)} tokens, {outcome.finish or 'no end'}"
        yield failure("short-answer", f"{got}; must be {request.max_new}, length. {outcome.message}")
    if outcome.chosen is not None and any(map(math.isnan, outcome.chosen)):
        yield failure("nan", "a log-probability is not a number")
    # SGLang counts no hits after a retraction, and what is found then may be somebody else's approximation.
    if request.ratio == 1 and outcome.cached == 0 and outcome.generation and not outcome.retractions:
        yield failure("generation", f"generation {outcome.generation} without a hit")


def comparable(request: Request, outcome: Outcome) -> bool:
    """Whether a cold answer must be the same: nothing approximate lies behind it. What its log-probabilities belong to
    must be known."""
    exact = outcome.status == 200 and request.ratio == 1 and not outcome.generation and outcome.finish == "length"
    return exact and not outcome.first_lost


class Difference(NamedTuple):
    logprob: float  # over the top tokens of the first new one; NaN if one is not a number
    token: int | None  # position of the first token that differs
    tie: bool  # two tokens were equally good there


def difference(hit: Outcome, cold: Outcome) -> Difference:
    """How far two answers to one prompt are apart."""
    pairs = zip(hit.tokens, cold.tokens, strict=False)
    token = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if token is None and len(hit.tokens) != len(cold.tokens):
        token = min(len(hit.tokens), len(cold.tokens))
    return Difference(_first_logprobs(hit, cold), token, token is not None and _tie(hit, cold, token))


def _first_logprobs(hit: Outcome, cold: Outcome) -> float:
    if _fault_of_top(hit) or _fault_of_top(cold):
        return math.nan
    a, b = hit.top[0], cold.top[0]
    # A token that one of them does not list is at most as likely there as the last one that it lists.
    missing = [max(0.0, a[t] - min(b.values())) for t in a.keys() - b.keys()]
    missing += [max(0.0, b[t] - min(a.values())) for t in b.keys() - a.keys()]
    return max([abs(a[t] - b[t]) for t in a.keys() & b.keys()] + missing)


def _fault_of_top(one: Outcome) -> str:
    """What keeps the first new token's log-probabilities from being compared; empty: nothing."""
    if one.top is None or not one.tokens:
        return f"{'no tokens' if one.top is not None else 'no log-probabilities'}, ended by {one.finish or 'nothing'}"
    first = one.top[0] if one.top else {}
    if not first or any(map(math.isnan, first.values())):
        chosen = one.chosen[:2] if one.chosen else one.chosen
        texts = f"of {len(one.tokens)} tokens {len(one.top)} log-probabilities, first {first}, chosen {chosen}"
        return f"{texts}, retracted {one.retractions} times"
    return ""


def _tie(hit: Outcome, cold: Outcome, at: int) -> bool:
    """Whether both answers say that the two tokens are as good as equal."""
    if not hit.top or not cold.top or at >= min(len(hit.top), len(cold.top)):
        return False
    a, b = hit.tokens[at], cold.tokens[at]
    return all(a in top and b in top and abs(top[a] - top[b]) <= TIE for top in (hit.top[at], cold.top[at]))


def compare(
    request: Request, prompt: Sequence[int], hit: Outcome, cold: Outcome, bound: float | None
) -> Iterator[Failure]:
    """Failures of an answer beside the cold one. With a bound log-probabilities are compared, without one tokens. None
    where the cold answer lost its first token's."""

    def failure(what: str, text: str) -> Failure:
        cached = f"{request.kind} of {len(prompt)} tokens, {hit.cached} cached"
        return Failure(what, f"{cached}: {text}", request.step, tuple(prompt))

    if cold.status != 200:
        yield failure("cold-failed", f"the cold answer: status {cold.status} {cold.message}")
        return
    if cold.cached:
        yield failure("not-isolated", f"{cold.cached} tokens from the cache under an extra_key of its own")
    if cold.first_lost:
        return
    found = difference(hit, cold)
    if math.isnan(found.logprob):
        faults = " and ".join(f"{n}: {f}" for n, o in (("it", hit), ("cold", cold)) if (f := _fault_of_top(o)))
        yield failure("nan", f"a log-probability is missing or not a number ({faults})")
    elif bound is not None and found.logprob > bound:
        yield failure("wrong-logprob", f"differs by {found.logprob:.3g} from the cold answer, bound {bound:.3g}")
    elif bound is None and found.token is not None and not found.tie:
        got, right = hit.tokens[found.token :][:1], cold.tokens[found.token :][:1]
        sides = [[one.top[found.token : found.token + 1] if one.top else ()] for one in (hit, cold)]
        text = f"new token {found.token} is {got}, in the cold answer {right}; retracted {hit.retractions} times, cold "
        text += f"{cold.retractions}; log-probabilities of the first token differ by {found.logprob:.2g}; there {sides}"
        yield failure("wrong-token", text)


class Sample(NamedTuple):
    """The server's processes at one moment."""

    at: float  # seconds
    processes: int
    rss_bytes: int


def growth(samples: Sequence[Sample], most_bytes: int) -> Iterator[Failure]:
    """Failures of the second half: it has to end with the processes, and about the memory, that it began with."""
    if len(samples) < 8:
        return
    half = [s for s in samples if s.at >= (samples[0].at + samples[-1].at) / 2]
    part = max(1, len(half) // 4)
    begin, end = half[:part], half[-part:]
    processes = [median([s.processes for s in part]) for part in (begin, end)]
    memory = [median([s.rss_bytes for s in part]) for part in (begin, end)]
    if processes[1] > processes[0]:
        yield Failure("process-leak", f"the server went from {processes[0]:.0f} to {processes[1]:.0f} processes")
    if memory[1] - memory[0] > most_bytes:
        text = f"the server's memory went from {memory[0] / 2**20:.0f} to {memory[1] / 2**20:.0f} MiB"
        yield Failure("memory-growth", f"{text} in the second half, at most {most_bytes / 2**20:.0f} MiB may be added")


@dataclass
class Tally:
    """Counts for the report."""

    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> status or end -> requests
    seconds: dict[str, list[float]] = field(default_factory=dict)
    compared: int = 0
    compared_hits: int = 0
    ties: int = 0
    retractions: int = 0
    first_lost: int = 0
    cached_tokens: int = 0
    worst_logprob: float = 0.0

    def count(self, kind: str, outcome: Outcome) -> None:
        end = str(outcome.status) if outcome.status != 200 else f"200 {outcome.finish or 'cut'}"
        ends = self.outcomes.setdefault(kind, {})
        ends[end] = ends.get(end, 0) + 1
        self.seconds.setdefault(kind, []).append(outcome.seconds)
        self.first_lost += outcome.first_lost
        self.retractions += outcome.retractions
        self.cached_tokens += outcome.cached

    def count_comparison(self, hit: Outcome, cold: Outcome) -> None:
        if cold.first_lost:
            return
        self.compared += 1
        self.compared_hits += hit.cached > 0
        found = difference(hit, cold)
        self.ties += found.tie
        if not math.isnan(found.logprob):
            self.worst_logprob = max(self.worst_logprob, found.logprob)

    def report(self) -> dict[str, Any]:
        def ms(values: list[float], share: float) -> float:
            ordered = sorted(values)
            return round(1e3 * ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)], 1)

        return {
            "requests": sum(map(len, self.seconds.values())),
            "kinds": {
                kind: {"ends": ends, "p50_ms": ms(self.seconds[kind], 0.5), "p99_ms": ms(self.seconds[kind], 0.99)}
                for kind, ends in sorted(self.outcomes.items())
            },
            "compared_with_cold": self.compared,
            "of_them_hits": self.compared_hits,
            "ties": self.ties,
            "worst_logprob_difference": self.worst_logprob,
            "retractions": self.retractions,
            "first_logprob_lost_by_sglang": self.first_lost,
            "cached_tokens": self.cached_tokens,
        }
