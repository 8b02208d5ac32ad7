"""A prefill outside of the scheduler's loop and of the cache: for an idle scheduler, which it leaves as it was.

Its request finds nothing in the tree, gets no rows, and is never inserted. All it takes is given back before the call
returns, so the scheduler's loop, its queues and its checks never see it. Where too few KV slots are free, cached tokens
used longest ago make room, as for any request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from sglang_tailreplay import compat
from sglang_tailreplay.scheduling import mark_internal

# Tokens of a pass: what a request that arrives meanwhile may have to wait for.
LARGEST_PASS = 2048


class ColdPrefill:
    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        chunk = scheduler.chunked_prefill_size
        self._chunk = min(chunk, LARGEST_PASS) if chunk and chunk > 0 else LARGEST_PASS
        self._wanted: Callable[[], bool] = compat.request_probe(scheduler)

    def fits(self, tokens: int) -> bool:
        """Whether an idle server has the memory for it."""
        free = self._scheduler.token_to_kv_pool_allocator.available_size()
        return tokens <= free + self._scheduler.tree_cache.full_evictable_size()

    @torch.no_grad()
    def __call__(self, tokens: array) -> torch.Tensor | None:
        """Logits [V] of the next token, on the host. None as soon as a request has arrived."""
        from sglang.srt.mem_cache.common import release_kv_cache

        req = compat.internal_request(self._scheduler, "tail-replay-verification", tokens)
        mark_internal(req)
        req.init_next_round_input(self._scheduler.tree_cache)
        logits = None
        with compat.forward_stream_of(self._scheduler):
            try:
                for begin in range(0, len(tokens), self._chunk):
                    if self._wanted():
                        return None
                    logits = self._pass(req, begin, min(begin + self._chunk, len(tokens)))
            finally:
                release_kv_cache(req, self._scheduler.tree_cache, is_insert=False)
        return logits

    def _pass(self, req: Any, begin: int, end: int) -> torch.Tensor:
        """Tokens [begin, end). Waits for the device, so that a request is noticed after one pass."""
        pool = self._scheduler.req_to_token_pool
        if begin > 0:
            req.prefix_indices = pool.req_to_token[req.req_pool_idx, :begin].to(torch.int64, copy=True)
        req.set_extend_range(begin, end)
        batch = compat.extend_batch(self._scheduler, req)
        return compat.forward(self._scheduler, batch)[0].cpu()
