"""Puts a prefix into a server's cache, asks, and checks that the answer came from exactly that prefix.

Each answer has a name space of its own in SGLang's cache (`extra_key`): whatever was asked before, nothing of it is
found, and no answer builds on what an approximate one left."""

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

from quality.answers import FULL, ZERO, Answer, ratio_of
from quality.codec import Codec
from quality.metrics import METRICS
from quality.prompt import Prompt


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
    timeout: float = 3600

    def answer(self, prompt: Prompt, cut: str | None, variant: str) -> Answer:
        """WrongBoundary if it was not served from the cut (of full: if anything was cached)."""
        m = 0 if variant == FULL else prompt.cut(cut)
        space, ratio = f"{self.run}/{prompt.digest}/{m}/{variant}/{time.monotonic_ns()}", ratio_of(variant)
        if m:
            self._cache(prompt.ids[: m + 1], m, space)
        begin = time.perf_counter()
        reply = self._generate(prompt.ids, prompt.new_tokens, space, ratio, prompt.stops)
        seconds = time.perf_counter() - begin
        check(reply, m, variant, self.max_tokens)
        text = self.codec.decode(reply.output) if self.codec else None
        score = METRICS[prompt.metric](reply.output if text is None else text, prompt.references)
        return Answer(
            *(prompt.name, prompt.cell, None if variant == FULL else cut, variant, prompt.digest, len(prompt.ids), m),
            *(reply.cached, reply.replayed or 0, reply.generation or 0, reply.output, text, score, round(seconds, 4)),
        )

    def _cache(self, ids: Sequence[int], m: int, space: str) -> None:
        """Prefill ids[:m] and then a token that is not ids[m], so that the tree branches at m whatever is generated."""
        other = ids[m] - 1 if ids[m] else ids[m] + 1
        reply = self._generate([*ids[:m], other], 1, space, None, False)
        if reply.cached:
            raise WrongBoundary(f"the prefix was to be computed, but {reply.cached} tokens of it were cached")

    def _generate(self, ids: Sequence[int], new: int, space: str, ratio: float | None, stops: bool) -> Reply:
        sampling: dict[str, Any] = {"max_new_tokens": new, "temperature": 0, "ignore_eos": not stops}
        if ratio is not None:
            sampling["custom_params"] = {"tail_replay_ratio": ratio}
        body = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": space}
        reply = post(f"{self.url}/generate", body, self.timeout)
        meta = reply["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        told = (details.get(f"tail_replay_{name}") for name in ("matched", "replayed", "generation", "anchored"))
        return Reply(reply["output_ids"], meta["cached_tokens"], *told)


def check(reply: Reply, m: int, variant: str, max_tokens: int | None = None) -> None:
    """WrongBoundary unless m tokens were cached and the variant's share of them was replayed, in one replay."""
    if reply.cached != m:
        raise WrongBoundary(f"meant to be served with {m} cached tokens, served with {reply.cached}")
    if variant == FULL:
        return
    if reply.matched != m or reply.replayed is None:
        raise WrongBoundary(f"the server does not tell of a replay at {m} (matched={reply.matched}): mode off?")
    if reply.anchored:
        raise WrongBoundary("the server saves states, so that hits do not depend on r: --tail-replay-anchor-interval 0")
    ratio = ratio_of(variant)
    if variant == ZERO and reply.replayed:
        raise WrongBoundary(f"{reply.replayed} tokens were replayed: the server is not in mode zero")
    if ratio is not None:
        least = min(m, max_tokens or m, ceil(Fraction(str(ratio)) * m))
        if reply.replayed < least:
            raise WrongBoundary(f"{reply.replayed} tokens were replayed, {variant} asks for {least} of {m}")
    if reply.generation != (reply.replayed < m):
        raise WrongBoundary(f"the answer builds on {reply.generation} approximate replays, not on its own only")
