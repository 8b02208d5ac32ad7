"""What a hit takes, from measured cells: the new tokens, then the replay or the loads beside it. Pure; numpy only.

    stock            max(pass, load of KV)
    tail replay      pass + max(token k + fetch of a state, load of KV)         k replayed tokens, rows included
    pass             prefill of stock SGLang (ttft_model.py), + short where the new tokens are few

`short`, of each engine, and `token` are fitted to the requests of a document of scripts/bench_ttft whose KV lay on the
GPU: short passes run in graphs and follow no line through long ones. What goes over the link follows from bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ttft_model
from ttft_model import TtftModel

SHORT = 2048  # new tokens; passes of up to so many run in graphs
SUFFIX = 64  # new tokens of the prompts of scripts/bench_ttft


@dataclass(frozen=True)
class HitModel:
    """Milliseconds."""

    prefill: TtftModel  # its replay terms are not used
    short_stock: float  # what a short pass takes more
    short_ours: float
    token: float  # of a replayed token
    kv_token: float  # of loading a token's KV
    state: float  # of fetching a saved state

    def stock(self, matched: int, length: int, loaded: int = 0) -> float:
        short = self.short_stock if length - matched <= SHORT else 0.0
        return max(self.prefill.prefill(matched, length) + short, loaded * self.kv_token)

    def ours(self, matched: int, length: int, replayed: int = 0, loaded: int = 0, anchored: bool = False) -> float:
        short = self.short_ours if length - matched <= SHORT else 0.0
        replay = replayed * self.token + (self.state if anchored else 0.0)
        return self.prefill.prefill(matched, length) + short + max(replay, loaded * self.kv_token)


def hits(document: Mapping[str, Any], source: str, engine: str = "host") -> Iterator[Mapping[str, Any]]:
    """Tail replay's in a document of scripts/bench_ttft, the shortest tail among them: {"length", "replayed", "ms"}."""
    for row in document["engines"][engine]["sections"]["hits"]["result"]:
        if row["kind"] in ("hit", "suffix") and row["source"] == source and row["replayed"]:
            yield row


class Checkpoint(NamedTuple):
    """A hit of stock SGLang."""

    matched: int
    length: int
    ms: float


def checkpoints(document: Mapping[str, Any]) -> list[Checkpoint]:
    """Of prompts that leave a cached one, in a document of scripts/gpu_check or scripts/bench_ttft."""
    sections = document["engines"]["stock"]["sections"]
    rows = (sections.get("ttft") or sections.get("hits"))["result"]
    found = [row for row in rows if row["kind"] in ("diverge", "again") and row["cached"][0]]
    return [
        Checkpoint(r["cached"][0], r.get("prompt_tokens", r.get("length", 0) + SUFFIX), r["ms"]["p50"]) for r in found
    ]


def fit(check: Mapping[str, Any], bench: Mapping[str, Any], kv_token_bytes: int, state_bytes: int) -> HitModel:
    """Of documents of scripts/gpu_check and scripts/bench_ttft. Stock's short passes are those of the document in which
    they were faster. ValueError without hits of two tails on the device, or without a short pass of stock on a hit."""
    prefill, cells = ttft_model.fit(check), list(hits(bench, "device"))
    tails = np.array([cell["replayed"][0] for cell in cells], float)
    stock = [more for document in (check, bench) if (more := _short_stock(prefill, document)) is not None]
    if len(set(tails)) < 2 or not stock:
        raise ValueError("no hits of two or more tails with KV on the device, or none of stock's, in these documents")
    lengths = [(cell["length"], cell["length"] + SUFFIX) for cell in cells]
    ours = np.array([cell["ms"]["p50"] - prefill.prefill(*one) for cell, one in zip(cells, lengths, strict=True)])
    (token, shift), *_ = np.linalg.lstsq(np.stack([tails, np.ones_like(tails)], axis=1), ours, rcond=None)
    link = bench["speeds"]["link_gbs"] * 1e6  # bytes per ms
    return HitModel(prefill, min(stock), float(shift), float(token), kv_token_bytes / link, state_bytes / link)


def _short_stock(prefill: TtftModel, document: Mapping[str, Any]) -> float | None:
    short = [one for one in checkpoints(document) if one.length - one.matched <= SHORT]
    if not short:
        return None
    return float(np.mean([one.ms - prefill.prefill(one.matched, one.length) for one in short]))
