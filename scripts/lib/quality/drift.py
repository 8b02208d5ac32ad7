"""Asks the turns of a conversation one on top of the other: each is served from what the last one left in the cache."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

from quality.answers import FULL, Answer, AnswerFile, Key, anchored, ratio_of
from quality.ask import Asker, Reply, WrongBoundary
from quality.prompt import Prompt
from quality.turns import Conversation

FRESH = "fresh"  # nothing is built on what a replay computed: --tail-replay-max-generation 0
ZERO_MODE = "zero"


class Way(NamedTuple):
    """How conversations are continued."""

    server: str
    variant: str


def ways(ratios: Sequence[float], intervals: Sequence[int], with_zero: bool) -> list[Way]:
    found = [Way("replay", FULL)]
    for ratio in ratios:
        found += [Way("replay", f"r={ratio:g}"), Way(FRESH, f"{FRESH}={ratio:g}")]
    found += [Way(f"anchored-{interval}", anchored(interval)) for interval in intervals]
    return [*found, Way(ZERO_MODE, ZERO_MODE)] if with_zero else found


def flags_of(server: str) -> list[str]:
    if server == FRESH:
        return ["--tail-replay-max-generation", "0"]
    if server.startswith("anchored-"):
        return ["--tail-replay-anchor-interval", server.removeprefix("anchored-")]
    return ["--tail-replay-mode", server]


def asked_ratio(variant: str) -> float | None:
    return ratio_of(variant.replace(f"{FRESH}=", "r="))


def turn_name(number: int) -> str:
    """The first is 1."""
    return f"turn {number}"


def number_of(cut: str) -> int:
    return int(re.fullmatch(r"turn (\d+)", cut)[1])


def keys(conversation: Conversation, variant: str) -> list[Key]:
    return [Key(conversation.name, turn_name(i), variant) for i in range(1, len(conversation.turns) + 1)]


def is_answered(conversation: Conversation, variant: str, kept: AnswerFile) -> bool:
    prompts = [turn.prompt for turn in conversation.turns]
    pairs = zip(keys(conversation, variant), prompts, strict=True)
    return all(kept.find(key, prompt.digest) is not None for key, prompt in pairs)


def converse(asker: Asker, conversation: Conversation, variant: str, kept: AnswerFile) -> None:
    """Keeps the answers of all turns. WrongBoundary if one was not served as it was meant to be: none is kept then."""
    space, answers = asker.space(conversation.turns[0].prompt.digest), []
    for number, (cut, prompt) in enumerate(conversation.turns, start=1):
        if variant == FULL:
            answers.append(_ask(asker, prompt, number, variant, 0, asker.space(prompt.digest)))
            continue
        # What comes before the question, as a message of its own: the next request is a hit that ends with it.
        said = asker.generate(prompt.ids[:cut], 1, space, False, asked_ratio(variant))
        _check_said(said, number, cut)
        answers.append(_ask(asker, prompt, number, variant, cut, space))
    for answer in answers:
        kept.add(answer)


def _ask(asker: Asker, prompt: Prompt, number: int, variant: str, cut: int, space: str) -> Answer:
    begin = time.perf_counter()
    limit = None if variant == FULL else cut
    reply = asker.generate(prompt.ids, prompt.new_tokens, space, prompt.stops, asked_ratio(variant), limit)
    seconds = time.perf_counter() - begin
    check(reply, number, cut, variant)
    return asker.answered(prompt, turn_name(number), variant, cut, reply, seconds)


def _check_said(reply: Reply, number: int, cut: int) -> None:
    if (reply.cached == 0) != (number == 1):
        raise WrongBoundary(f"turn {number}, {cut} tokens: {reply.cached} of them were cached")


def check(reply: Reply, number: int, cut: int, variant: str) -> None:
    """WrongBoundary unless the turn was served from what the turns before it left."""
    if variant.startswith(FRESH):
        if not 0 < reply.cached <= cut or reply.generation > 1:
            raise WrongBoundary(f"turn {number}: {reply.cached} tokens cached, {reply.generation} replays behind them")
    elif reply.cached != cut:
        raise WrongBoundary(f"turn {number}: meant to be served with {cut} cached tokens, served with {reply.cached}")
    if variant.startswith("anchored") and reply.generation:
        raise WrongBoundary(f"turn {number}: began as {reply.start}, {reply.generation} approximate replays behind it")
