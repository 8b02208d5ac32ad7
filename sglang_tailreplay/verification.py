"""The online guard: a share of the hits is computed again from nothing while the server is idle, and compared.

    a hit's prefill   logits of its next token kept         (at most KEPT hits, the newest)
    server idle       cold prefill of the same tokens       (cold_prefill.py; gives way to any request)
                      first token and distribution compared (metrics, log)

What is compared is what the model says, before penalties, grammars and sampling.
"""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from sglang_tailreplay.step import Sample

logger = logging.getLogger(__name__)

KEPT = 8  # hits that wait for an idle server; each holds one row of logits on the device
IDLE_SECONDS = 0.5  # a client that sends one request after the other is not disturbed
MOST_ATTEMPTS = 3  # prefills that a request may interrupt before a hit is given up
MOST_KL = 100.0  # nats; what is not finite counts as this


class Agreement(NamedTuple):
    """A hit against a cold prefill."""

    first_token: bool  # both have the same most likely token
    kl: float  # nats, from the cold distribution to the hit's


class Watcher(Protocol):
    """Where results go."""

    def verified(self, agreement: Agreement) -> None: ...

    def unverified(self, hits: int) -> None: ...


class _Waiting:
    __slots__ = ("tokens", "logits", "attempts")

    def __init__(self, tokens: array, logits: torch.Tensor):
        self.tokens, self.logits, self.attempts = tokens, logits, 0


def compare(cold: torch.Tensor, hit: torch.Tensor) -> Agreement:
    """Logits [V] both, on the host."""
    p, q = (logits.float().log_softmax(0) for logits in (cold, hit))
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    kl = float(terms.sum())
    return Agreement(int(cold.argmax()) == int(hit.argmax()), min(max(kl, 0.0), MOST_KL) if kl == kl else MOST_KL)


class Verifier:
    """One per scheduler, on its thread."""

    def __init__(
        self,
        fraction: float,
        prefill: Callable[[array], torch.Tensor | None],
        fits: Callable[[int], bool],
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`prefill(tokens)`: logits [V] of the next token on the host, computed without the cache; None if it gave way
        to a request. `fits(n)`: whether a prefill of n tokens may be tried."""
        self.fraction = fraction
        self._prefill, self._fits, self._watcher, self._clock = prefill, fits, watcher, clock
        self._random = random.Random(0)
        self._waiting: deque[_Waiting] = deque()
        self._passes, self._idle_since = -1, 0.0
        self.count = self.agreeing = 0
        self.kl_sum = 0.0

    def draws(self) -> bool:
        """Whether the hit at hand is one to check."""
        return self._random.random() < self.fraction

    def answered(self, samples: Sequence[Sample], logits: torch.Tensor | None) -> None:
        """The pass of these hits has been launched: logits [requests, V] on the current stream."""
        if logits is None:  # a model that gives none
            return
        for sample in samples:
            # A copy: the next pass in the same graph writes over it, and so does sampling.
            self._waiting.append(_Waiting(sample.tokens, logits[sample.index].clone()))
        self._give_up(len(self._waiting) - KEPT)

    def forget(self) -> None:
        """The cache was flushed, or the weights leave or have changed: what the hits said is of no interest now."""
        self._give_up(len(self._waiting))

    def _give_up(self, hits: int) -> None:
        """The oldest ones."""
        for _ in range(hits):
            self._waiting.popleft()
        if hits > 0 and self._watcher is not None:
            self._watcher.unverified(hits)

    def on_idle(self, passes: int) -> None:
        """Called over and over while the server is idle. `passes`: forward passes of requests so far."""
        if passes != self._passes:
            self._passes, self._idle_since = passes, self._clock()
        if not self._waiting or self._clock() - self._idle_since < IDLE_SECONDS:
            return
        before = self.count
        while self._waiting and self._verify_next():
            pass
        if self.count > before:
            logger.info(
                "tail_replay: verified %d hits so far: the first token agrees in %d, mean KL %.2e nats",
                *(self.count, self.agreeing, self.kl_sum / self.count),
            )

    def _verify_next(self) -> bool:
        """The oldest hit; False if a request wants the server."""
        hit = self._waiting[0]
        if hit.attempts == MOST_ATTEMPTS or not self._fits(len(hit.tokens)):
            self._give_up(1)
            return True
        hit.attempts += 1
        cold = self._prefill(hit.tokens)
        if cold is None:
            return False
        self._waiting.popleft()
        self._note(compare(cold, hit.logits.cpu()))
        return True

    def _note(self, agreement: Agreement) -> None:
        self.count += 1
        self.agreeing += agreement.first_token
        self.kl_sum += agreement.kl
        if self._watcher is not None:
            self._watcher.verified(agreement)
