"""What caches hold with the same bytes on the GPU and on the host. Pure integers.

    GPU    stock        KV | states of its cache and of running requests              as measured, at the same share
           tail replay  KV | states of running requests
    host   stock        KV | states                                                   HiCache
           tail replay  rows of all KV | saved states | KV                            HiCache, for KV

Stock's host is cut in the way of SPLITS that serves it best. A host tier holds copies of what is on the GPU as well, as
SGLang's default (write_through) has it, or only what is not there (`exclusive`, as write_back nearly does)."""

from __future__ import annotations

import math
from typing import NamedTuple

GIB = 1 << 30
SPLITS = (0.5, 0.7, 0.9, 1.0)  # of stock's host memory: the share of KV


class Bytes(NamedTuple):
    kv: int  # of a token
    rows: int  # of a token
    state: int  # of a request, on the GPU and in stock's host tier
    anchor: int  # of a saved state of tail replay


class Held(NamedTuple):
    device_tokens: int  # whose KV fits the GPU
    tokens: int  # whose KV fits GPU and host
    states: int  # stock's kept states, or places for anchors


def both(device: int, host: int, exclusive: bool) -> int:
    """How many different things two tiers hold."""
    return device + host if exclusive else max(device, host)


def stock(
    device_tokens: int, device_states: int, host_bytes: int, share: float, size: Bytes, exclusive: bool = False
) -> Held:
    """`share`: of the host memory, that KV takes; states take the rest."""
    kv = int(host_bytes * share)
    tokens = both(device_tokens, kv // size.kv, exclusive)
    return Held(device_tokens, tokens, both(device_states, (host_bytes - kv) // size.state, exclusive))


def tail_replay(
    device_tokens: int, host_bytes: int, interval: int, anchor_bytes: int, size: Bytes, exclusive: bool = False
) -> Held:
    """`anchor_bytes`: what states may take of the host; there are no more than one per interval. Where rows of the
    GPU's KV do not fit, KV without rows counts as not there: a hit needs them."""

    def tokens(left: int) -> int:
        own_rows = device_tokens * size.rows if exclusive else 0  # a copy's rows are those of the token
        tier = (left - own_rows) // (size.kv + size.rows)
        held = both(device_tokens, max(tier, 0), exclusive)
        return held if held > device_tokens else min(max(left, 0) // size.rows, device_tokens)

    places = min(math.ceil(tokens(host_bytes) / interval), anchor_bytes // size.anchor) if interval else 0
    held = tokens(host_bytes - places * size.anchor)
    return Held(min(device_tokens, held), held, places)
