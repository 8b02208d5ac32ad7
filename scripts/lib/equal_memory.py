"""What caches hold with the same bytes on the GPU and on the host. Pure integers.

    GPU    stock        KV | states of its cache and of running requests              as measured, at the same share
           tail replay  KV | states of running requests
    host   stock        KV | states       HiCache, as if what is on the GPU were not there as well
           tail replay  rows of all KV | saved states | KV, with its rows

Stock's host is cut in the way of SPLITS that serves it best. SGLang 0.5.17 copies what is on the GPU to the host as
well, so with the same bytes both hold less than is counted for them here, stock most of all."""

from __future__ import annotations

import math
from typing import NamedTuple

GIB = 1 << 30
SPLITS = (0.3, 0.5, 0.7, 0.9)  # of stock's host memory: the share of KV


class Bytes(NamedTuple):
    kv: int  # of a token
    rows: int  # of a token
    state: int  # of a request, on the GPU and in stock's host tier
    anchor: int  # of a saved state of tail replay


class Held(NamedTuple):
    device_tokens: int  # whose KV fits the GPU
    tokens: int  # whose KV fits GPU and host
    states: int  # stock's kept states, or places for anchors


def stock(device_tokens: int, device_states: int, host_bytes: int, share: float, size: Bytes) -> Held:
    """`share`: of the host memory, that KV takes; states take the rest."""
    kv = int(host_bytes * share)
    return Held(device_tokens, device_tokens + kv // size.kv, device_states + (host_bytes - kv) // size.state)


def tail_replay(device_tokens: int, host_bytes: int, interval: int, anchor_bytes: int, size: Bytes) -> Held:
    """`anchor_bytes`: what states may take of the host; there are no more than one per interval. Where rows of the
    GPU's KV do not fit, KV without rows counts as not there: a hit needs them."""

    def tokens(left: int) -> int:
        more = (left - device_tokens * size.rows) // (size.kv + size.rows)
        return device_tokens + more if more > 0 else min(max(left, 0) // size.rows, device_tokens)

    places = min(math.ceil(tokens(host_bytes) / interval), anchor_bytes // size.anchor) if interval else 0
    held = tokens(host_bytes - places * size.anchor)
    return Held(min(device_tokens, held), held, places)
