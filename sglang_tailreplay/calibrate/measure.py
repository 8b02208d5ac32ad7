"""Asks a server: one cold prefill of a prompt, then hits at a boundary inside it, compared token by token.

The cold request puts the whole prompt into the cache. A hit asks for log-probabilities from the boundary on, and SGLang
matches no further than those begin, so every hit is served from exactly there, whatever else is cached; its own tokens
are in the tree already, computed cold, and stay.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_tailreplay.calibrate.judge import Sample, divergence
from sglang_tailreplay.calibrate.plan import Cell, ratio_for

TOP = 64  # tokens of cold's distribution that are compared one by one
Distribution = dict[int, float]  # log-probability by token


class NotServed(RuntimeError):
    """A request that failed, or was not served from its boundary: no data point."""


class Cold(NamedTuple):
    ids: list[int]
    boundary: int
    next_tokens: list[Distribution]  # cold's most likely ones at every token from the boundary on


@dataclass(frozen=True)
class Client:
    url: str
    timeout: float = 3600

    def get(self, path: str) -> Any:
        return self._open(urllib.request.Request(f"{self.url}{path}"))

    def cold(self, ids: list[int], boundary: int, space: str, vocab_size: int) -> Cold:
        """Prefill a prompt of which nothing is cached under the name `space`. NotServed if something was."""
        # A batch in which only some requests name tokens ends SGLang 0.5.17's scheduler, so this one names one, too.
        asked = {"top_logprobs_num": min(TOP, vocab_size), "token_ids_logprob": [0]}
        meta = self._generate(ids, boundary, space, asked)
        if meta["cached_tokens"]:
            raise NotServed(f"the prompt was to be computed, but {meta['cached_tokens']} tokens of it were cached")
        return Cold(ids, boundary, _distributions(meta, "top_logprobs"))

    def hit(self, cold: Cold, cell: Cell, space: str) -> Sample:
        """The same prompt from its boundary. NotServed if it was not served from there with that tail."""
        tokens = sorted({token for one in cold.next_tokens for token in one})
        asked = {"top_logprobs_num": 1, "token_ids_logprob": tokens}
        tail = cell.tail_at(cold.boundary)
        ratio = ratio_for(tail, cold.boundary)
        meta = self._generate(cold.ids, cold.boundary, space, asked, ratio)
        details = meta.get("cached_tokens_details") or {}
        replayed, generation = (details.get(f"tail_replay_{key}") for key in ("replayed", "generation"))
        if meta["cached_tokens"] != cold.boundary or replayed is None:
            raise NotServed(f"meant to be served from token {cold.boundary}, served from {meta['cached_tokens']}")
        if generation and not tail <= replayed:
            raise NotServed(f"{replayed} tokens were replayed, not {tail}")
        if generation > 1:
            raise NotServed(f"{generation} approximate replays lie behind the answer, not one")
        tops, named = _distributions(meta, "top_logprobs"), _distributions(meta, "token_ids_logprobs")
        return Sample(
            agreed=tuple(agree(c, h, max(t.values())) for c, h, t in zip(cold.next_tokens, named, tops, strict=True)),
            kl=tuple(divergence(c, h) for c, h in zip(cold.next_tokens, named, strict=True)),
            replayed=replayed,
            exact=generation == 0,
        )

    def _generate(
        self, ids: Sequence[int], begin: int, space: str, asked: dict[str, Any], ratio: float | None = None
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        if ratio is not None:
            sampling["custom_params"] = {"tail_replay_ratio": ratio}
        body = {"input_ids": list(ids), "sampling_params": sampling, "extra_key": space, **asked}
        body |= {"return_logprob": True, "logprob_start_len": begin}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return self._open(request)["meta_info"]

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise NotServed(f"{error.code} {error.read().decode(errors='replace')[:300]}") from error
        except OSError as error:
            raise NotServed(f"{request.full_url}: {error}") from error


def agree(cold: Distribution, hit: Distribution, best: float) -> bool:
    """Whether a token that cold finds most likely is one that the hit finds most likely: `best` is its log-probability.

    Logits in bfloat16 tie often, and which of two tied tokens comes first is no difference between cold and hit.
    """
    likeliest = max(cold.values())
    return any(hit[token] >= best for token, logprob in cold.items() if logprob == likeliest)


def _distributions(meta: dict[str, Any], kind: str) -> list[Distribution]:
    """One per token from the boundary on. SGLang gives none for its first input token, which nothing predicted."""
    each = [*meta[f"input_{kind}"][1:], *meta[f"output_{kind}"]]
    return [{token: logprob for logprob, token, _ in one} for one in each]
