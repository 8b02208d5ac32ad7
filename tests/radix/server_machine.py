"""Random work for a CheckedScheduler, as a hypothesis state machine, and how long to search."""

import gc
import os
import weakref
from typing import NamedTuple

from checked_scheduler import KV_SLOTS, CheckedScheduler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_tailreplay.config import TailReplayConfig

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
# Without a seed: the same cases every time, of which the quick ones are the first.
QUICK = settings(max_examples=25, stateful_step_count=25, derandomize=True, database=None, **COMMON)
LONG = settings(QUICK, max_examples=100)
SEARCH = settings(max_examples=2000, stateful_step_count=80, print_blob=True, **COMMON)
PROFILE = SEARCH if os.environ.get("TAIL_REPLAY_SEARCH") else QUICK

IMAGE = 1000  # token ids from here on stand for images, as SGLang pads them
LONGEST_PROMPT = 56

bits = st.integers(0, 2**24 - 1)
budgets = st.sampled_from([64, 24, 16, 7])


class Request(NamedTuple):
    """A prompt that repeats the beginning of an earlier text, and what to do with it."""

    text: int  # which one, counted from the newest
    keep: int  # tokens of it
    image: int | None
    length: int  # tokens that follow
    pattern: int
    answer: int  # most tokens to generate
    ratio: float | None  # the request's own replay ratio


requests = st.builds(
    Request,
    text=st.integers(0, 7),
    keep=st.sampled_from([56, 48, 40, 33, 27, 20, 13, 9, 8, 5, 4, 3, 1, 0]),
    image=st.sampled_from([None, None, None, None, 0, 1]),
    length=st.sampled_from([1, 2, 5, 12, 24]),
    pattern=bits,
    answer=st.sampled_from([3, 1, 2, 6, 12]),
    ratio=st.sampled_from([None, None, None, 0.3, 1.0]),
)


def tokens(length: int, pattern: int) -> list[int]:
    """Two symbols, so that prompts meet often; small numbers mean long runs."""
    return [1 + (pattern >> i & 1) for i in range(length)]


class ServerMachine(RuleBasedStateMachine):
    @initialize(
        ratio=st.sampled_from([0.05, 0.3, 1.0]),
        min_tokens=st.sampled_from([4, 8]),
        max_tokens=st.sampled_from([None, None, 12]),
        mode=st.sampled_from(["replay", "replay", "replay", "zero"]),
        capacity=st.sampled_from([KV_SLOTS, KV_SLOTS, 60, 60, 40, 24, 7, 0]),
        overlap=st.booleans(),
        interval=st.sampled_from([0, 0, 6, 10, 24]),
        anchors=st.sampled_from([1, 3, 20]),
        most=st.sampled_from([None, None, 0, 1]),
        residual=st.sampled_from([None, None, None, 0.3, 0.02]),
    )
    def start(self, ratio, min_tokens, max_tokens, mode, capacity, overlap, interval, anchors, most, residual):
        tails = dict(ratio=ratio, min_tokens=min_tokens, max_tokens=max_tokens)
        if mode == "zero":
            interval, residual, capacity = 0, None, 0
        config = TailReplayConfig(
            mode=mode, anchor_interval=interval, max_generation=most, max_residual=residual, **tails
        )
        rows, anchors = capacity, anchors if interval else 0
        self.server = CheckedScheduler(config, rows, overlap, anchors)
        self.texts = [tokens(56, 0xA5C3F1), tokens(56, 0xA5C3FF)]  # what prompts may begin with

    def sampler(self, pattern: int):
        """Tokens of a forward pass, one per call."""
        draws = iter(tokens(24, pattern))
        return lambda: next(draws)

    def arrive(self, requests: list[Request]) -> None:
        for request in requests:
            said = self.texts[-1 - request.text % len(self.texts)]
            image = [] if request.image is None else [IMAGE + request.image] * 5
            prompt = (said[: request.keep] + image + tokens(request.length, request.pattern))[:LONGEST_PROMPT]
            req = self.server.arrive(prompt, request.answer, request.ratio, plain=max(prompt) < IMAGE)
            # A later prompt may diverge anywhere in this one, or repeat what was answered, the last token included.
            self.texts += [prompt, self.server.accounts[req.rid].tokens]

    @rule(requests=st.lists(requests, max_size=3), budget=budgets, pattern=bits, mixed=st.booleans())
    def prefill(self, requests, budget, pattern, mixed):
        self.arrive(requests)
        self.server.prefill(budget, self.sampler(pattern), mixed)

    @rule(requests=st.lists(requests, min_size=1, max_size=4), budget=budgets, pattern=bits)
    def serve_to_the_end(self, requests, budget, pattern):
        """What a server does when no more requests come: it ends idle, with every row in the tree or free."""
        self.arrive(requests)
        for _ in range(100):
            if self.server.idle:
                break
            self.server.prefill(budget, self.sampler(pattern))
            self.server.decode(self.sampler(pattern >> 2))
            self.server.settle()
        assert self.server.idle
        assert not any(account.own_rows for account in self.server.accounts.values())

    @rule(index=st.integers(0, 7))
    def abort(self, index):
        self.server.abort(index)

    @rule(pattern=bits)
    def decode(self, pattern):
        self.server.decode(self.sampler(pattern))

    @rule(pattern=bits, n=st.integers(2, 8))
    def decode_on(self, pattern, n):
        for _ in range(n):
            self.server.decode(self.sampler(pattern))

    @precondition(lambda self: self.server.running)
    @rule(pattern=bits, n=st.integers(1, 3))
    def retract(self, pattern, n):
        self.server.decode(self.sampler(pattern), retract=n)

    @rule()
    def drain(self):
        self.server.drain()

    @precondition(lambda self: self.server.waiting)
    @rule(index=st.integers(0, 7))
    def look_up_without_admission(self, index):
        self.server.match(self.server.waiting[index % len(self.server.waiting)])

    # ---- memory ----

    @precondition(lambda self: self.server.truth)
    @rule(n=st.integers(1, 40))
    def evict(self, n):
        self.server.evict_kv(n)

    @precondition(lambda self: self.server.idle and self.server.truth)
    @rule()
    def flush(self):
        self.server.flush()

    @precondition(lambda self: self.server.running and self.server.last is None)
    @rule(index=st.integers(0, 3))
    def lose_a_request(self, index):
        gone = weakref.ref(self.server.lose(index))
        if gone() is not None:
            gc.collect()  # a request with parameters of its own refers to itself
        assert gone() is None
        self.server.check()

    @invariant()
    def consistent(self):
        self.server.check()
