"""UnifiedRadixCache with two additions: hits shrink to a whole tail, and rows are reset with the tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tailreplay.radix.component import TailReplayComponent


class TailReplayCache(UnifiedRadixCache):
    """`tail_length_of(req)` gives the tail planner of a request, or None if none of its hits needs a tail;
    `may_reuse(req)` says whether it may be served from the cache at all."""

    tail_length_of: Callable[[object], Callable[[int], int] | None] = staticmethod(lambda req: None)
    may_reuse: Callable[[object], bool] = staticmethod(lambda req: True)

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
        result = super().match_prefix(params)
        matched = len(result.device_indices)
        usable = self._usable(params.req, result, matched)
        params.req.tail_replay_shrunk = (matched, usable) if usable < matched else None
        if usable == matched:
            return result
        return super().match_prefix(dataclasses.replace(params, key=_limited(params.key, usable)))

    def _usable(self, req, result: MatchResult, matched: int) -> int:
        tail_length = self.tail_length_of(req)
        if tail_length is None or matched == 0:
            return matched
        return self.rows.usable_boundary(self.tree_core.node_by_id(result.last_device_node), matched, tail_length)

    def reset(self) -> None:
        # Called by the constructor too, when there is nothing to forget yet.
        if hasattr(self, "components"):
            self.rows.forget_nodes()
        super().reset()

    def check_invariants(self) -> None:
        self.rows.check_invariants()


def _limited(key: RadixKey, limit: int) -> RadixKey:
    return RadixKey(token_ids=key.token_ids, extra_key=key.extra_key, limit=limit)
