"""Puts prompts into a server's cache, asks them again, and checks that the answer came from exactly the wanted prefix.

    cold    the whole prompt, in a name space of its own in SGLang's cache (`extra_key`): nothing of it is found
    then    the same prompt for every variant, each with a limit to what it takes from the cache (`request_settings`)

So a prompt is prefilled once for all its variants, and none builds on what another one left: that lies behind the
limit."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from quality.answers import COLD, SEEDED, ZERO, Answer, anchored_of, plain_of, ratio_of, tail_of
from quality.codec import Codec
from quality.metrics import METRICS
from quality.prompt import Prompt
from sglang_tailreplay.replay.tail import tail_length
from sglang_tailreplay.request_settings import LIMIT_PARAM

LEAST_TAIL = 64  # tokens, as a server's default


class WrongBoundary(RuntimeError):
    """An answer that was not served as it was meant to be: no data point."""


class ServerFailed(RuntimeError):
    pass


class Reply(NamedTuple):
    output: list[int]
    cached: int
    matched: int | None  # these: None where the answer does not tell them
    replayed: int | None
    generation: int | None
    start: str | None = None  # how the replay began
    anchored: int | None = None  # 1: its states were rebuilt from a saved one


def post(url: str, body: dict[str, Any], timeout: float) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{url}: {error.code} {error.read().decode(errors='replace')[:500]}") from error
    except OSError as error:
        raise ServerFailed(f"{url}: {error}") from error


@dataclass(frozen=True)
class Asker:
    """One server. `run` keeps its name spaces apart from those of other runs."""

    url: str
    run: str
    codec: Codec | None
    max_tokens: int | None = None  # the server's --tail-replay-max-tokens
    min_tokens: int = LEAST_TAIL  # its --tail-replay-min-tokens
    timeout: float = 3600

    def space(self, name: str) -> str:
        """A name space that nobody has used."""
        return f"{self.run}/{name}/{time.monotonic_ns()}"

    def generate(
        self,
        ids: Sequence[int],
        new: int,
        space: str,
        stops: bool,
        ratio: float | None = None,
        limit: int | None = None,
    ) -> Reply:
        """Greedy. `ratio`: of the replay; `limit`: most tokens to take from the cache. None: the server's own."""
        sampling: dict[str, Any] = {"max_new_tokens": new, "temperature": 0, "ignore_eos": not stops}
        own = {"tail_replay_ratio": ratio, LIMIT_PARAM: limit}
        if own := {name: value for name, value in own.items() if value is not None}:
            sampling["custom_params"] = own
        body = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": space}
        reply = post(f"{self.url}/generate", body, self.timeout)
        meta = reply["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        told = (
            details.get(f"tail_replay_{name}") for name in ("matched", "replayed", "generation", "start", "anchored")
        )
        return Reply(reply["output_ids"], meta["cached_tokens"], *told)

    def answered(self, prompt: Prompt, cut: str | None, variant: str, m: int, reply: Reply, seconds: float) -> Answer:
        """The reply with its score."""
        text = self.codec.decode(reply.output) if self.codec else None
        score = METRICS[prompt.metric](reply.output if text is None else text, prompt.references)
        return Answer(
            *(prompt.name, prompt.cell, cut, variant, prompt.digest, len(prompt.ids), m, reply.cached),
            *(reply.replayed or 0, reply.generation or 0, reply.output, text, score, round(seconds, 4)),
            start=reply.start or "",
        )


class Cached:
    """A prompt and what a server has of it in its cache."""

    def __init__(self, asker: Asker, prompt: Prompt):
        self.asker, self.prompt = asker, prompt
        self._space: str | None = None  # where the prompt lies, computed without any cache

    def answer(self, cut: str | None, variant: str) -> Answer:
        """WrongBoundary if it was not served from the cut (cold: if anything was cached); the prompt is then computed
        anew before the next one."""
        try:
            return self._answer(cut, variant)
        except WrongBoundary:
            self._space = None
            raise

    def _answer(self, cut: str | None, variant: str) -> Answer:
        prompt, cold = self.prompt, variant in COLD
        if cold:
            self._space = self.asker.space(prompt.digest)
        elif self._space is None:
            self._prefill()
        m = 0 if cold else boundary(prompt.cut(cut), variant, self.asker.min_tokens)
        begin = time.perf_counter()
        reply = self.asker.generate(
            prompt.ids, prompt.new_tokens, self._space, prompt.stops, asked_ratio(m, variant), None if cold else m
        )
        seconds = time.perf_counter() - begin
        check(reply, m, variant, self.asker.max_tokens)
        return self.asker.answered(prompt, None if cold else cut, variant, m, reply, seconds)

    def _prefill(self) -> None:
        self._space = self.asker.space(self.prompt.digest)
        reply = self.asker.generate(self.prompt.ids, 1, self._space, stops=False)
        if reply.cached:
            raise WrongBoundary(f"the prompt was to be computed, but {reply.cached} tokens of it were cached")


def boundary(cut: int, variant: str, min_tokens: int = LEAST_TAIL) -> int:
    """Tokens to serve from the cache: a plain extend begins where a replay of that ratio would."""
    ratio = plain_of(variant)
    return cut if ratio is None else cut - tail_length(cut, ratio, min_tokens)


def asked_ratio(m: int, variant: str) -> float | None:
    """The replay ratio that gives the variant's tail behind m tokens; None: the server's."""
    tail = tail_of(variant)
    if tail is None:
        return ratio_of(variant)
    return 1.0 if tail >= m else (tail - 0.5) / m  # a server rounds up


def _share(m: int, ratio: float) -> int:
    return ceil(Fraction(str(ratio)) * m)


def check(reply: Reply, m: int, variant: str, max_tokens: int | None = None) -> None:
    """WrongBoundary unless m tokens were cached and the variant's share of them was replayed, in one replay."""
    if reply.cached != m:
        raise WrongBoundary(f"meant to be served with {m} cached tokens, served with {reply.cached}")
    if variant in COLD or m == 0:
        return
    if reply.matched != m or reply.replayed is None:
        raise WrongBoundary(f"the server does not tell of a replay at {m} (matched={reply.matched}): mode off?")
    if variant == SEEDED:  # on whatever state is there
        return
    if anchored_of(variant) is not None:
        if reply.start != "exact" or reply.generation:
            raise WrongBoundary(
                f"the states at {m} are not exact, the replay began as {reply.start}: no saved one near"
            )
        return
    if reply.anchored:
        raise WrongBoundary("the server saves states, so that hits do not depend on r: --tail-replay-anchor-interval 0")
    _check_tail(reply, m, variant, max_tokens)
    if reply.generation != (reply.replayed < m):
        raise WrongBoundary(f"the answer builds on {reply.generation} approximate replays, not on its own only")


def _check_tail(reply: Reply, m: int, variant: str, max_tokens: int | None) -> None:
    if (variant == ZERO or plain_of(variant) is not None) and reply.replayed:
        raise WrongBoundary(f"{reply.replayed} tokens were replayed: the server is not in mode zero")
    ratio, tail = ratio_of(variant), tail_of(variant)
    wanted = _share(m, ratio) if ratio is not None else tail or 0
    least = min(m, max_tokens or m, wanted)
    if reply.replayed < least:
        raise WrongBoundary(f"{reply.replayed} tokens were replayed, {variant} asks for {least} of {m}")
