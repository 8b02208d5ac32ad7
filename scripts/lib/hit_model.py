"""What a hit takes, from measured cells: the new tokens, then the replay or the loads beside it. Pure; numpy only.

    stock            max(pass, load of KV)
    tail replay      pass + max(token k + fetch of a state, load of KV)         k replayed tokens, rows included
    pass             prefill of stock SGLang (ttft_model.py), + short where the new tokens are few

`short`, of each engine, and `token` are fitted to the requests of a document of scripts/bench_ttft whose KV lay on the
GPU: short passes run in graphs and follow no line through long ones. What goes over the link follows from bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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


def hits(document: Mapping[str, Any], source: str) -> Iterator[Mapping[str, Any]]:
    """Tail replay's in a document of scripts/bench_ttft, the shortest tail among them: {"length", "replayed", "ms"}."""
    for row in document["engines"]["host"]["sections"]["hits"]["result"]:
        if row["kind"] in ("hit", "suffix") and row["source"] == source and row["replayed"]:
            yield row


def stock_hits(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Stock's, with few new tokens or many: {"length", "cached", "ms"}."""
    for row in document["engines"]["stock"]["sections"]["hits"]["result"]:
        if row["cached"][0]:
            yield row


def fit(prefill: TtftModel, document: Mapping[str, Any], kv_token_bytes: int, state_bytes: int) -> HitModel:
    """ValueError for a document without hits of two tails on the device, or without a short one of stock."""
    cells = list(hits(document, "device"))
    tails = np.array([cell["replayed"][0] for cell in cells], float)
    short = [row for row in stock_hits(document) if row["length"] + SUFFIX - row["cached"][0] <= SHORT]
    if len(set(tails)) < 2 or not short:
        raise ValueError("no hits of two or more tails with KV on the device, or none of stock's, in this document")

    def more(row: Mapping[str, Any], matched: int) -> float:
        return row["ms"]["p50"] - prefill.prefill(matched, row["length"] + SUFFIX)

    ours = np.array([more(cell, cell["length"]) for cell in cells])
    (token, shift), *_ = np.linalg.lstsq(np.stack([tails, np.ones_like(tails)], axis=1), ours, rcond=None)
    stock = float(np.mean([more(row, row["cached"][0]) for row in short]))
    link = document["speeds"]["link_gbs"] * 1e6  # bytes per ms
    return HitModel(prefill, stock, float(shift), float(token), kv_token_bytes / link, state_bytes / link)
