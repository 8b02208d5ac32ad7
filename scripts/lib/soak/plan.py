"""What a soak sends, from one seed: integers and tokens only, no clock, no server.

Requests come in rounds. All of a round are in flight together, and a round begins when the last one is over, so that
what a request builds on is known: a request begins with `kept` tokens of an earlier one's text (its prompt and, if it
ran to its end, its answer) and goes on with fresh tokens. Answers are of fixed length, so that lengths are known here
and only the tokens of answers come from the server."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    ROOT = "root"  # a prompt that shares nothing
    TURN = "turn"  # a whole earlier text and more: the next turn of a chat
    DIVERGE = "diverge"  # leaves an earlier text at a random token
    REPEAT = "repeat"  # an earlier prompt again
    ONE_TOKEN = "one-token"  # an earlier text and one token more
    FAN = "fan"  # one of many of a round that share a prefix
    BURST = "burst"  # one of more than the server runs at once, with a long answer: queueing and retraction
    DISCONNECT = "disconnect"  # a stream whose client goes away
    ABORT = "abort"  # ended by /abort_request
    TOO_LONG = "too-long"
    MALFORMED = "malformed"


class Flush(StrEnum):
    NONE = "none"
    BUSY = "busy"  # while the round's requests run: refused, or done in a gap between them
    IDLE = "idle"  # after the round: must succeed


ENDS = frozenset(Kind) - {Kind.DISCONNECT, Kind.ABORT, Kind.TOO_LONG, Kind.MALFORMED}  # kinds that are answered in full
REFUSED = frozenset({Kind.TOO_LONG, Kind.MALFORMED})
RATIOS = (0.02, 0.1, 0.3, 0.7)  # of requests that are not compared
WEIGHTS = {
    **{Kind.ROOT: 3, Kind.TURN: 4, Kind.DIVERGE: 5, Kind.REPEAT: 3, Kind.ONE_TOKEN: 2},
    **{Kind.DISCONNECT: 2, Kind.ABORT: 2, Kind.TOO_LONG: 1, Kind.MALFORMED: 1},
}
REMEMBERED = 48  # texts that a new request may build on: old ones stay, so that evicted ones are asked for again

# Bodies, merged into a good one, that a server must refuse. None replaces the key by nothing.
MALFORMED: tuple[dict[str, Any], ...] = (
    {"input_ids": None},
    {"input_ids": []},
    {"input_ids": "abc"},
    {"input_ids": [1.5, 2]},
    {"sampling_params": "greedy"},
    {"sampling_params": {"max_new_tokens": -1}},
    {"sampling_params": {"temperature": -1.0}},
    {"sampling_params": {"top_p": 7}},
    *({"sampling_params": {"custom_params": {"tail_replay_ratio": bad}}} for bad in (0, -0.5, 1.01, "half", True, [1])),
)


class Limits(NamedTuple):
    """What the server and the user allow."""

    max_prompt: int  # tokens of a prompt
    max_new: int  # tokens of an answer, at most
    concurrency: int  # requests of a common round
    running: int  # requests that the server runs at once
    context: int  # a longer prompt must be refused
    vocabulary: tuple[int, int]  # token ids [low, high)


@dataclass(frozen=True)
class Request:
    step: int
    kind: Kind
    base: int | None  # step whose text it begins with
    kept: int  # tokens of that text
    fresh: int  # tokens behind them
    max_new: int
    ratio: float
    events: int = 0  # DISCONNECT, ABORT: after this many events of the stream; 0: at once
    fault: int = 0  # MALFORMED: which

    @property
    def prompt_length(self) -> int:
        return self.kept + self.fresh

    @property
    def reusable(self) -> int:
        """Tokens of its text that later requests may build on."""
        return self.prompt_length + (self.max_new if self.kind in ENDS else 0)


class Round(NamedTuple):
    index: int
    requests: tuple[Request, ...]
    flush: Flush
    checked: frozenset[int]  # steps whose answers are compared with cold ones; all of them have ratio 1


class Planner:
    """`next_round()` over and over; the same seed and limits give the same rounds."""

    def __init__(self, seed: int, limits: Limits):
        if limits.max_prompt < 16 or limits.max_new < 2 or limits.concurrency < 1:
            raise ValueError(f"at least 16 tokens of prompt, 2 of answer and one request at a time, got {limits}")
        self.limits = limits
        self._draw = random.Random(seed)
        self._steps = 0
        self._index = 0
        self._known: list[Request] = []  # what a new request may build on

    def next_round(self, checked_share: float = 0.5) -> Round:
        draw, index = self._draw, self._index
        self._index += 1
        if index % 8 == 5:
            requests = self._burst()
        elif index % 4 == 2 and self._known:
            requests = self._fan()
        else:
            kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
            requests = [self._one(kind) for kind in draw.choices(kinds, weights, k=self.limits.concurrency)]
        exact = [r.step for r in requests if r.kind in ENDS and r.ratio == 1]
        checked = frozenset(draw.sample(exact, round(len(exact) * checked_share)))
        self._remember(requests)
        flush = Flush.IDLE if index % 16 == 13 else Flush.BUSY if index % 4 == 3 else Flush.NONE
        return Round(index, tuple(requests), flush, checked)

    def _one(self, kind: Kind) -> Request:
        draw, limits = self._draw, self.limits
        base = self._base()
        new = draw.randint(1, max(2, limits.max_new // 2))
        if kind is Kind.TOO_LONG:
            return self._make(kind, None, 0, limits.context + draw.choice((1, 7, 500)), new)
        if base is None or kind in (Kind.ROOT, Kind.MALFORMED):
            longest = limits.max_prompt if draw.random() < 0.5 else max(2, limits.max_prompt // 4)
            return self._make(kind if kind in REFUSED else Kind.ROOT, None, 0, draw.randint(1, longest), new)
        if kind is Kind.REPEAT:
            return self._make(kind, base, base.prompt_length, 0, new)
        if kind is Kind.ONE_TOKEN:
            return self._make(kind, base, min(base.reusable, limits.max_prompt - 1), 1, new)
        whole = kind is Kind.TURN or draw.random() < 0.2
        kept = base.reusable if whole else draw.randint(1, base.reusable)
        return self._make(kind, base, min(kept, limits.max_prompt - 1), draw.randint(1, limits.max_prompt), new)

    def _fan(self) -> list[Request]:
        """Many requests at once that share a prefix; some of them with nothing else, or with one token more."""
        base = self._base()
        kept = min(self._draw.randint(1, base.reusable), self.limits.max_prompt - 1)
        most, new = max(2, self.limits.max_prompt // 8), min(4, self.limits.max_new)
        return [
            self._make(Kind.FAN, base, kept, self._draw.choice((0, 1, self._draw.randint(1, most))), new)
            for _ in range(2 * self.limits.concurrency)
        ]

    def _burst(self) -> list[Request]:
        """More than the server runs at once. Long answers outgrow what was reserved for them, so some are retracted."""
        burst = []
        for _ in range(max(2 * self.limits.running, self.limits.concurrency)):
            base = self._base() if self._draw.random() < 0.6 else None
            kept = min(self._draw.randint(1, base.reusable), self.limits.max_prompt // 2) if base else 0
            fresh = self._draw.randint(1, max(2, self.limits.max_prompt // 4))
            burst.append(self._make(Kind.BURST, base, kept, fresh, self.limits.max_new))
        return burst

    def _base(self) -> Request | None:
        """What to build on: mostly something recent, which a small cache still has."""
        recent = self._known[-2 * self.limits.concurrency :] if self._draw.random() < 0.7 else self._known
        return self._draw.choice(recent) if recent else None

    def _make(self, kind: Kind, base: Request | None, kept: int, fresh: int, new: int) -> Request:
        draw, step = self._draw, self._steps
        self._steps += 1
        if kind is not Kind.TOO_LONG:
            fresh = min(fresh, self.limits.max_prompt - kept)
        cut_short = kind in (Kind.DISCONNECT, Kind.ABORT)
        return Request(
            *(step, kind, base.step if base else None, kept, fresh, self.limits.max_new if cut_short else new),
            ratio=1.0 if draw.random() < 0.75 else draw.choice(RATIOS),
            events=draw.choice((0, 1, 1, 2, 5)) if cut_short else 0,
            fault=draw.randrange(len(MALFORMED)) if kind is Kind.MALFORMED else 0,
        )

    def _remember(self, requests: Sequence[Request]) -> None:
        self._known += [r for r in requests if r.kind not in REFUSED]
        while len(self._known) > REMEMBERED:
            # Any of the older half: some texts live long, most do not.
            self._known.pop(self._draw.randrange(len(self._known) // 2))

    @property
    def known(self) -> frozenset[int]:
        """Steps whose texts may still be asked for."""
        return frozenset(r.step for r in self._known)


def fresh_tokens(seed: int, step: int, n: int, vocabulary: tuple[int, int]) -> list[int]:
    """n tokens that depend on the arguments only."""
    draw = random.Random(hashlib.sha256(f"{seed}/{step}".encode()).digest())
    return [draw.randrange(*vocabulary) for _ in range(n)]


def prompt_of(
    request: Request, seed: int, texts: Mapping[int, Sequence[int]], vocabulary: tuple[int, int]
) -> list[int]:
    """Token ids of the prompt. `texts` has prompt and answer of every step that may be built on. An answer that is
    shorter than planned (its request failed) is made up for with fresh tokens."""
    if request.kind is Kind.TOO_LONG:  # a context may be a quarter of a million tokens, and nobody will read them
        block = fresh_tokens(seed, request.step, 64, vocabulary)
        return (block * (request.prompt_length // len(block) + 1))[: request.prompt_length]
    kept = list(texts.get(request.base, ())[: request.kept]) if request.base is not None else []
    return kept + fresh_tokens(seed, request.step, request.prompt_length - len(kept), vocabulary)


def malformed(body: dict[str, Any], fault: int) -> dict[str, Any]:
    """A good body with one fault."""
    bad = dict(body)
    for key, value in MALFORMED[fault].items():
        if key == "sampling_params" and isinstance(value, dict):
            value = {**body[key], **value}
        bad[key] = value
    return {key: value for key, value in bad.items() if value is not None}
