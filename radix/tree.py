"""UnifiedRadixCache whose hits are those that a replay can serve: a whole tail, and what limits allow. Rows are reset
with the tree.

A hit is a part whose KV is on the device, then one whose KV is on the host (with HiCache). Its boundary m is the end of
both: the host part is loaded back before the request runs, while its rows are where they always are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tailreplay.radix.boundary import GENERATION, RESIDUAL, ROWS_MISSING, Shrunk
from sglang_tailreplay.radix.component import TailReplayComponent

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class TailReplayCache(UnifiedRadixCache):
    """`tail_length_of(req)` gives the tail planner of a request, or None if none of its hits needs a tail;
    `may_reuse(req)` says whether it may be served from the cache at all, `limit_of(req)` from how many tokens of it at
    most (None: no limit); no hit takes tokens that have more than `max_generation` approximate replays behind them
    (None: no limit)."""

    tail_length_of: Callable[[object], Callable[[int], int] | None] = staticmethod(lambda req: None)
    may_reuse: Callable[[object], bool] = staticmethod(lambda req: True)
    limit_of: Callable[[object], int | None] = staticmethod(lambda req: None)
    max_generation: int | None = None
    # node, tokens up to its end, boundary whose tail is whole, tail planner -> the longest boundary, at most that one,
    # at which a replay leaves little enough out; None: no limit
    within_bound: Callable[[UnifiedTreeNode, int, int, Callable[[int], int]], int] | None = None
    on_reset: Callable[[], None] = staticmethod(lambda: None)
    load_back_threshold = 0  # tokens; set by init_hicache
    forward_stream: object = None  # where forward passes run; set before init_hicache

    @property
    def rows(self) -> TailReplayComponent:
        return self.components[ComponentType.MAMBA]

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As SGLang's, but for a request (params.req) the boundary is one that a replay can serve."""
        if params.req is None:
            # The tree asks for its own bookkeeping and must find all it has just inserted.
            return super().match_prefix(params)
        if not self.may_reuse(params.req):
            params.req.tail_replay_shrunk = None
            if params.req.positional_embed_overrides is not None:
                # Its KV comes of vectors that its token ids do not name (an image's ids are a hash of the image), so
                # nobody may find it under them.
                params.req.extra_key = f"tail_replay:{params.req.rid}"
            return self.tree_core.empty_match_result
        limit = self.limit_of(params.req)
        if limit is not None and limit < len(params.key):
            params = dataclasses.replace(params, key=_limited(params.key, limit))
        result = super().match_prefix(params)
        device, host = len(result.device_indices), result.host_hit_length
        matched = device + host if self._loads(host) else device
        shrunk = self._usable(params.req, result, matched)
        params.req.tail_replay_shrunk = shrunk if shrunk.usable < matched else None
        if shrunk.usable == device + host:
            return result
        return super().match_prefix(dataclasses.replace(params, key=_limited(params.key, shrunk.usable)))

    def _usable(self, req, result: MatchResult, matched: int) -> Shrunk:
        """The longest boundary <= matched that a replay can serve and that HiCache will provide."""
        tail_length = self.tail_length_of(req)
        device = len(result.device_indices)
        if matched == device:
            return self._whole(result.last_device_node, device, tail_length)
        shrunk = self._whole(result.best_match_node, matched, tail_length)
        if shrunk.usable <= device or self._loads(shrunk.usable - device):
            return shrunk
        on_device = self._whole(result.last_device_node, device, tail_length)
        why = RESIDUAL if RESIDUAL in (shrunk.reason, on_device.reason) else ROWS_MISSING
        return Shrunk(matched, on_device.usable, why)

    def _whole(self, node: int, m: int, tail_length: Callable[[int], int] | None) -> Shrunk:
        """The longest boundary <= m within the limits of generations and residuals whose tail, if one is needed, is
        whole; the reason is that of the last cut.

        The node with this id ends at token m.
        """
        last, limit = self._within_limit(node, m)
        if tail_length is None or limit == 0:
            return Shrunk(m, limit, GENERATION)
        usable = self.rows.usable_boundary(last, limit, tail_length)
        if self.within_bound is not None and usable > 0:
            within = self.within_bound(last, limit, usable, tail_length)
            if within < usable:
                return Shrunk(m, within, RESIDUAL)
        return Shrunk(m, usable, GENERATION if usable == limit else ROWS_MISSING)

    def _within_limit(self, node: int, m: int) -> tuple[UnifiedTreeNode, int]:
        """The part of a prefix of m tokens that max_generation lets a hit take: its last node and its length."""
        last = self.tree_core.node_by_id(node)
        return (last, m) if self.max_generation is None else self.rows.within_generation(last, m, self.max_generation)

    def _loads(self, tokens: int) -> bool:
        """Whether SGLang loads that few tokens from the host. It computes them again where a load is not worth it."""
        return 0 < tokens and self.load_back_threshold <= tokens

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, int]:
        """As SGLang's. If it finds no room, the hit is what lies on the device, which needs a whole tail of its own."""
        indices, node = super().init_load_back(params)
        if len(indices) > 0:
            return indices, node
        req = params.req
        device, req.host_hit_length = len(req.prefix_indices), 0
        shrunk = self._whole(node, device, self.tail_length_of(req))
        if shrunk.usable < device:
            key = RadixKey(token_ids=req.full_untruncated_fill_ids, extra_key=req.extra_key, limit=shrunk.usable)
            result = super().match_prefix(MatchPrefixParams(key=key))
            # The caller appends the indices returned here to those of the request.
            req.prefix_indices, node = result.device_indices, result.last_device_node
            req.tail_replay_shrunk = shrunk
        return indices, node

    def reset(self) -> None:
        # Called by the constructor too, when there is nothing to forget yet.
        if hasattr(self, "components"):
            self.rows.forget_nodes()
            self.on_reset()
        super().reset()

    def check_invariants(self) -> None:
        self.rows.check_invariants()


def _limited(key: RadixKey, limit: int) -> RadixKey:
    return RadixKey(token_ids=key.token_ids, extra_key=key.extra_key, limit=limit)
