"""A soak from its first request to its verdict."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from soak import processes
from soak.client import Client
from soak.judge import (
    Failure,
    Outcome,
    Sample,
    Sent,
    Tally,
    Text,
    comparable,
    compare,
    difference,
    growth,
    judge,
    possible_hits,
)
from soak.plan import ENDS, REFUSED, Flush, Limits, Planner, Request, Round, fresh_tokens, prompt_of

CALIBRATION_PROMPTS = 6
MARGIN = 4  # an honest difference may be so many times the largest of a handful of cold-versus-cold ones
ENOUGH_ROUNDS = 8  # by then some requests must have been hits
ROWS_USED, ROWS = "sglang:tail_replay_rows_used", "sglang:tail_replay_rows_capacity"


class Settings(NamedTuple):
    seed: int
    seconds: float
    limits: Limits
    checked_share: float
    max_logprob_difference: float | None  # None: compare tokens
    max_growth_bytes: int
    max_failures: int = 20  # the soak stops there
    max_rounds: float = math.inf
    rest_seconds: float = 15  # within which a server at rest has to say so


@dataclass
class Soak:
    """Drives one server. `pid` is its process, if it runs on this machine."""

    client: Client
    settings: Settings
    pid: int | None = None
    progress: Callable[[str], None] = lambda line: None
    failures: list[Failure] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    samples: list[Sample] = field(default_factory=list)
    flushes: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    metrics_watched: bool = False  # False: the server has no /metrics, so that rows were not looked at

    def __post_init__(self):
        self.planner = Planner(self.settings.seed, self.settings.limits)
        self._texts: dict[int, list[int]] = {}
        self._sent = Sent()
        self._unchecked: list[tuple[Request, list[int], Outcome]] = []

    async def run(self) -> None:
        """Rounds until time or rounds are over or too much has failed, then the checks of a server at rest."""
        await self.flush_idle()
        begin = time.monotonic()
        while time.monotonic() - begin < self.settings.seconds and not self.over:
            told = len(self.failures)
            await self.round(self.planner.next_round(self.settings.checked_share))
            self.progress(self._line(time.monotonic() - begin))
            for failure in self.failures[told:]:  # now: whoever ends the soak early must know of them, too
                self.progress(f"  {failure.what}: {failure.text}")
        await self.compare_with_cold()
        await self.at_rest()
        if self.rounds >= ENOUGH_ROUNDS and not self.tally.compared_hits:
            text = "no answer to a hit could be compared: no hits, or all of them approximate"
            self.failures.append(Failure("nothing-proved", text))
        self.failures += growth(self.samples, self.settings.max_growth_bytes)

    @property
    def over(self) -> bool:
        return len(self.failures) >= self.settings.max_failures or self.rounds >= self.settings.max_rounds

    def _line(self, seconds: float) -> str:
        done = sum(map(len, self.tally.seconds.values()))
        memory = f", {self.samples[-1].rss_bytes / 2**20:.0f} MiB" if self.samples else ""
        return (
            f"{seconds:4.0f} s  round {self.rounds}: {done} requests, {self.tally.compared} compared, "
            f"{self.tally.retractions} retractions{memory}, {len(self.failures)} failures"
        )

    # ------------------------------------------------------------------------------------------------------- a round

    async def round(self, planned: Round) -> None:
        prompts = self._prompts(planned)
        rids = [f"soak-{self.settings.seed}-{time.monotonic_ns()}-{r.step}" for r in planned.requests]
        sending = [self.client.send(*each) for each in zip(planned.requests, prompts, rids, strict=True)]
        outcomes, _ = await asyncio.gather(asyncio.gather(*sending), self._flush_busy(planned.flush))
        self._judge(planned, prompts, outcomes)
        if planned.index % 4 == 1:
            await self.compare_with_cold()
        if planned.flush is Flush.IDLE:
            await self.flush_idle()
        if not await self.client.healthy():
            self.failures.append(Failure("unhealthy", f"/health fails after round {planned.index}"))
        if self.pid is not None:
            self.samples.append(processes.sample(self.pid))
        self.rounds += 1

    def _prompts(self, planned: Round) -> list[list[int]]:
        seed, vocabulary = self.settings.seed, self.settings.limits.vocabulary
        return [prompt_of(r, seed, self._texts, vocabulary) for r in planned.requests]

    def _judge(self, planned: Round, prompts: list[list[int]], outcomes: list[Outcome]) -> None:
        """Each answer on its own; remembers its text for later rounds."""
        answered = list(zip(planned.requests, prompts, outcomes, strict=True))
        for request, prompt, outcome in answered:
            self.tally.count(request.kind, outcome)
            if request.step in planned.checked and comparable(request, outcome):
                self._unchecked.append((request, prompt, outcome))
            if request.kind in REFUSED:
                self.failures += judge(request, prompt, outcome, 0)
        served = [each for each in answered if each[0].kind not in REFUSED]
        texts = [text_of(r, p, o) for r, p, o in served]
        for (request, prompt, outcome), possible in zip(served, possible_hits(self._sent, texts), strict=True):
            self.failures += judge(request, prompt, outcome, possible)
        for (request, _, _), text in zip(served, texts, strict=True):
            whole = [*text.prompt, *text.answer]
            self._sent.add(whole, text.unseen)
            self._texts[request.step] = whole
        known = self.planner.known
        self._texts = {step: text for step, text in self._texts.items() if step in known}

    async def compare_with_cold(self) -> None:
        """For several rounds at once: cold answers fill the cache, and what is evicted by them is hit by nobody."""
        checked, self._unchecked = self._unchecked, []
        key = f"soak-cold-{time.time_ns()}"
        answers = await asyncio.gather(
            *(self.client.cold(prompt, r.max_new, f"{key}-{r.step}") for r, prompt, _ in checked)
        )
        for (request, prompt, outcome), cold in zip(checked, answers, strict=True):
            self.failures += compare(request, prompt, outcome, cold, self.settings.max_logprob_difference)
            self.tally.count_comparison(outcome, cold)
            self.tally.count("cold", cold)

    # -------------------------------------------------------------------------------------------- flushes and the end

    async def _flush_busy(self, flush: Flush) -> None:
        if flush is Flush.BUSY:
            await asyncio.sleep(0.05)
            try:
                self._count_flush("busy: done" if await self.client.flush() else "busy: refused")
            except httpx.HTTPError as error:
                self.failures.append(Failure("flush", f"while requests ran: {error!r}"))

    async def flush_idle(self) -> None:
        """Must succeed, and afterwards nothing of earlier rounds may be found."""
        try:
            done, reason = await self.client.flush(wait_seconds=20), "refused for 20 s although every request is over"
        except httpx.HTTPError as error:
            done, reason = False, repr(error)
        if done:
            self._sent.clear()
            self._count_flush("idle")
        else:
            self.failures.append(Failure("flush", f"at rest: {reason}"))

    def _count_flush(self, name: str) -> None:
        self.flushes[name] = self.flushes.get(name, 0) + 1

    async def at_rest(self) -> None:
        """No request is left, the server's own leak checks stay silent, and a flush takes every row."""
        await self._rest_check("requests-left", lambda m: m.get("sglang:num_running_reqs", 0) == 0)
        await self._rest_check("rows", lambda m: 0 <= m.get(ROWS_USED, 0) <= m.get(ROWS, math.inf))
        await self.flush_idle()
        await self._rest_check("row-leak", lambda m: m.get(ROWS_USED, 0) == 0)
        # SGLang's checks and ours run once the server is idle, and end it if something does not add up.
        await asyncio.sleep(self.settings.rest_seconds / 8)
        prompt = fresh_tokens(self.settings.seed, -1, 8, self.settings.limits.vocabulary)
        last = await self.client.exact(prompt, 2)
        if last.status != 200:
            self.failures.append(Failure("dead", f"no answer once at rest: status {last.status} {last.message}"))

    async def _rest_check(self, what: str, holds: Callable[[dict[str, float]], bool]) -> None:
        """Gauges are written now and then: wait for the right value."""
        seconds, metrics = self.settings.rest_seconds, {}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                metrics = await self.client.metrics()
            except (httpx.HTTPError, ValueError) as error:
                self.failures.append(Failure("metrics", f"/metrics cannot be read: {error!r}"))
                return
            self.metrics_watched = bool(metrics)
            if holds(metrics):
                return
            await asyncio.sleep(0.25)
        shown = {k: v for k, v in metrics.items() if k in (ROWS_USED, ROWS, "sglang:num_running_reqs")}
        self.failures.append(Failure(what, f"still {shown} after {seconds:.0f} s at rest"))


def text_of(request: Request, prompt: list[int], outcome: Outcome) -> Text:
    """What a cache may hold of a request. What was cut, or has failed, may have gone on unseen."""
    whole = request.kind in ENDS and outcome.status == 200
    answer = outcome.tokens if whole else ()
    return Text(prompt, answer, 0 if whole else request.max_new, outcome.retractions > 0 or not whole)


class Calibration(NamedTuple):
    noise: float  # largest difference of two cold answers to one prompt, in another batch
    control: float  # smallest difference of answers to prompts whose first half differs
    bound: float


async def calibrate(client: Client, seed: int, limits: Limits) -> Calibration:
    """What two honest answers differ by on this server. RuntimeError if a wrong one would not stand out of it.

    Alone, a prompt is cut at multiples of the server's chunk; together, prompts share chunks and batches."""
    length = limits.max_prompt
    prompts = [fresh_tokens(seed, -2 - i, length, limits.vocabulary) for i in range(CALIBRATION_PROMPTS)]
    other = fresh_tokens(seed, -100, length // 2, limits.vocabulary)
    key = f"soak-calibration-{time.time_ns()}"
    alone = [await client.cold(p, 2, f"{key}-a{i}") for i, p in enumerate(prompts)]
    together = await asyncio.gather(*(client.cold(p, 2, f"{key}-b{i}") for i, p in enumerate(prompts)))
    wrong = [await client.cold(other + p[len(other) :], 2, f"{key}-c{i}") for i, p in enumerate(prompts)]
    failed = next((o for o in (*alone, *together, *wrong) if o.status != 200), None)
    if failed is not None:
        raise RuntimeError(f"no answer to a calibration request: status {failed.status} {failed.message}")
    noises = [difference(a, b).logprob for a, b in zip(alone, together, strict=True)]
    controls = [difference(a, b).logprob for a, b in zip(alone, wrong, strict=True)]
    if any(map(math.isnan, noises + controls)):
        raise RuntimeError("a log-probability of a cold answer is missing or not a number")
    noise, control = max(noises), min(controls)
    bound = max(MARGIN * noise, 1e-3)
    if bound >= control:
        raise RuntimeError(
            f"two cold answers differ by up to {noise:.3g}, answers to other prompts by {control:.3g}: a wrong answer "
            "would not be seen. Give --max-logprob-difference, or a model in float32."
        )
    return Calibration(noise, control, bound)
