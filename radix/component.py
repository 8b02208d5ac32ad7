"""The tree component that owns rows: SGLang's MAMBA component without any recurrent state.

SGLang's UnifiedRadixCache runs a hybrid model with a FULL component (KV) and a MAMBA component (recurrent states).
Here the MAMBA component stores no state: its value stays None for ever, so every token boundary is a match, nothing is
copied on a hit, and SGLang's accounting of state slots holds (each slot belongs to a running request or is free). What
it keeps instead is a RowSpan in the node's metadata: row ids per token, on the host, moved and freed with the node.

Rows follow the node and not the KV slot, because node data is host memory: whether a tail is whole is known at match
time without reading a device tensor, and a node whose KV moves to the host tier or back keeps its rows. They are freed
when the node leaves the tree, which is when its KV is on no tier any more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.mamba_component import MambaComponent
from sglang.srt.mem_cache.unified_cache.components.tree_component import PrepareLoadBackResult, TreeComponent

from sglang_tailreplay.radix.anchors import NodeAnchors
from sglang_tailreplay.radix.boundary import usable_boundary
from sglang_tailreplay.radix.rows import NO_ROW, RequestRows, RowPool, RowSpan, no_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

_FULL = ComponentType.FULL
_ROWS = "tail_replay_rows"


class Tail(NamedTuple):
    """The last tokens of a matched prefix."""

    rows: np.ndarray  # [k] int64
    generation: int  # the highest one on the whole matched path


class TailReplayComponent(MambaComponent):
    """MAMBA component with rows instead of states; UnifiedRadixCache makes it (`component_registry_override`)."""

    def __init__(self, cache: UnifiedRadixCache, params: CacheInitParams):
        # Past MambaComponent.__init__, which reads the settings of the states that this one does not keep.
        TreeComponent.__init__(self, cache, params)
        self._mamba_pool_host = None
        self.mamba_max_states_per_path = -1
        self.pool = RowPool(0)
        self.anchors = NodeAnchors(self.component_type, RowPool(0))
        self._holders: dict[int, UnifiedTreeNode] = {}
        self._requests: weakref.WeakSet[RequestRows] = weakref.WeakSet()
        # (request, number of its tokens that the tree is going to get), while its state slot is still its own
        self.before_finish: Callable[[Req, int], None] = lambda req, tokens: None
        self._orphans: deque[RequestRows] = deque()  # rows of requests that the garbage collector took

    # ---- rows of running requests ----

    def set_pool(self, pool: RowPool, anchors: RowPool | None = None) -> None:
        self.pool = pool
        self.anchors.pool = anchors or RowPool(0)

    def track(self, req: Req) -> RequestRows:
        """The request's rows, made on first use. If the request object dies unreleased, its rows return to the pool."""
        rows = getattr(req, "tail_replay", None)
        if rows is None:
            rows = req.tail_replay = RequestRows()
            self._requests.add(rows)
            # The collector may run in the middle of anything, so it only leaves a note (deque.append is atomic).
            weakref.finalize(req, self._orphans.append, rows).atexit = False
        return rows

    def _release_orphans(self) -> None:
        while self._orphans:
            self.release(self._orphans.popleft())

    def release(self, rows: RequestRows, until: int | None = None) -> None:
        """Take back a request's rows of the tokens before `until`, or all of them, and its anchors up to there."""
        position = rows.end if until is None else until
        self.pool.free(rows.release_until(position))
        self.anchors.free(rows.take_anchors(-1, max(rows.anchors, default=0) if until is None else until))

    def alloc(self, n: int) -> np.ndarray:
        """[n] row ids. Where the store has no room the *first* are NO_ROW, so that the rows there are make a tail."""
        self._release_orphans()
        if self.pool.free_rows < n:
            self._evict_rows(n)
        ids = self.pool.alloc(n)
        return ids if len(ids) == n else np.concatenate((no_rows(n - len(ids)), ids))

    def _evict_rows(self, wanted: int) -> None:
        """Until `wanted` rows are free, take rows from the nodes used longest ago.

        Locked nodes are spared: their tails may be fetched any moment. Nodes whose KV is on the host are no exception:
        KV leaves the device in the same order, so they are the first here as well, unless a hit has just touched them.
        """
        # A little more than wanted, so that a full store does not sort its nodes for every decode step.
        goal = min(wanted + self.pool.capacity // 64, self.pool.capacity)
        unlocked = [n for n in self._holders.values() if n.component_data[_FULL].lock_ref == 0]
        for node in sorted(unlocked, key=lambda n: n.last_access_time):
            if self.pool.free_rows >= goal:
                return
            self._drop_rows(node)

    # ---- rows of nodes ----

    def span(self, node: UnifiedTreeNode) -> RowSpan | None:
        return node.component_data[self.component_type].metadata.get(_ROWS)

    def _set_span(self, node: UnifiedTreeNode, span: RowSpan) -> None:
        node.component_data[self.component_type].metadata[_ROWS] = span
        self._relist(node)

    def _relist(self, node: UnifiedTreeNode) -> None:
        """Keep the list of nodes that hold rows true after a change of node's span."""
        if (self.span(node).ids != NO_ROW).any():
            self._holders[node.id] = node
        else:
            self._holders.pop(node.id, None)

    def _drop_rows(self, node: UnifiedTreeNode) -> None:
        """Free the node's rows and the anchors that they made useful. Its span stays, because the generation of its KV
        is still needed."""
        span = self.span(node)
        if span is not None:
            self.pool.free(span.ids)
            span.ids = no_rows(len(span.ids))
            self._relist(node)
            self.anchors.rows_dropped(node)

    def validity(self, node: UnifiedTreeNode) -> np.ndarray:
        """[tokens from the root to the end of node] bool: which have a row."""
        parts = []
        while node is not self.tree_core.root_node:
            span = self.span(node)
            parts.append(span.ids != NO_ROW if span is not None else np.zeros(len(node.key), dtype=bool))
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, dtype=bool)

    def usable_boundary(self, node: UnifiedTreeNode, m: int, tail_length: Callable[[int], int]) -> int:
        """The longest boundary <= m on the path to node whose tail is whole. node ends at token m."""
        if not (self.tail(node, tail_length(m)).rows == NO_ROW).any():
            return m
        return usable_boundary(self.validity(node), tail_length)

    def within_generation(self, node: UnifiedTreeNode, m: int, most: int) -> tuple[UnifiedTreeNode, int]:
        """The longest part of the path to node, which ends at token m, that has no token of a generation above most.

        Its last node and its number of tokens.
        """
        last, length = node, m
        while m > 0:
            m -= len(node.key)
            span = self.span(node)
            node = node.parent
            if span is not None and span.generation > most:
                last, length = node, m
        return last, length

    def tail(self, node: UnifiedTreeNode, k: int) -> Tail:
        """The last k tokens before the end of node (NO_ROW where a token has none)."""
        parts, missing, generation = [], k, 0
        while node is not self.tree_core.root_node:
            span = self.span(node)
            if span is not None:
                generation = max(generation, span.generation)
            if missing > 0:
                ids = span.ids if span is not None else no_rows(len(node.key))
                parts.append(ids[-missing:])
                missing -= len(parts[-1])
            node = node.parent
        assert missing == 0, f"a tail of {k} tokens is {missing} longer than its prefix"
        return Tail(np.concatenate(parts[::-1]) if parts else no_rows(0), generation)

    def _adopt(self, node: UnifiedTreeNode, begin: int, rows: RequestRows | None) -> None:
        """Give the node, whose tokens are [begin, begin + len(key)) of an inserted request, the rows it lacks."""
        if rows is None:
            return
        span = self.span(node)
        if span is None:
            span = RowSpan(no_rows(len(node.key)), rows.generation)
            self._set_span(node, span)
        self.anchors.adopt(node, begin, rows, span.generation)
        lacking = np.flatnonzero(span.ids == NO_ROW)
        if len(lacking) == 0:
            return
        # Only the stretch that lacks rows is moved; what the node has stays and the request's copy is freed later.
        lo, hi = int(lacking[0]), int(lacking[-1]) + 1
        offered = rows.move(begin + lo, begin + hi)
        empty = span.ids[lo:hi] == NO_ROW
        if (offered[empty] != NO_ROW).any():
            span.generation = max(span.generation, rows.generation)
        span.ids[lo:hi][empty] = offered[empty]
        self.pool.free(offered[~empty])
        self._relist(node)

    # ---- hooks of the tree: matching ----

    def create_match_validator(self, match_device_only: bool = False):
        # Every boundary. A hit with an incomplete tail is shrunk by the cache before the request sees it.
        return lambda node: True

    def finalize_match_result_in_tree_core(self, result, *args, **kwargs):
        return result

    def finalize_match_result_in_cache(self, params, result):
        return result

    def refresh_lru(self, *args, **kwargs) -> None:
        pass

    # ---- hooks of the tree: inserting ----

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        rows = insert_params.tail_replay = getattr(req, "tail_replay", None)
        if rows is None:
            return None
        if is_finished:
            self.before_finish(req, token_ids_len)
        return self._insertable(req, rows, token_ids_len, is_finished)

    def _insertable(self, req: Req, rows: RequestRows, tokens: int, is_finished: bool) -> int | None:
        """How many of the request's first `tokens` the tree may be given; None: all.

        Where the tree has a token, it keeps its own KV, and the request goes on with that. It must not be KV that more
        approximate replays lie behind than behind the request's: what follows then stays the request's own.
        """
        node, end = self.tree_core.node_by_id(req.last_node), req.cache_protected_len
        if not node.children:
            return None
        ids = req.origin_input_ids + req.output_ids if is_finished else req.get_fill_ids()
        key = RadixKey(ids[end:tokens], req.extra_key)
        while len(key) > 0 and (child := node.children.get(key.child_key())) is not None:
            span, common = self.span(child), child.key.match(key)
            if span is not None and span.generation > rows.generation:
                return end
            if common < len(child.key):
                return None
            node, end, key = child, end + common, key[common:]
        return None

    def update_component_on_insert_overlap(
        self, node, prefix_len: int, total_prefix_len: int, value_slice, params: InsertParams, cache_actions
    ) -> int:
        self._adopt(node, total_prefix_len, getattr(params, "tail_replay", None))
        return prefix_len

    def recover_after_unevict(self, node, prefix_len: int, total_prefix_len: int, params, cache_actions) -> None:
        """The node, whose KV was on the host only, takes the KV that the request has computed again."""
        rows = getattr(params, "tail_replay", None)
        self._adopt(node, total_prefix_len, rows)
        span = self.span(node)
        if span is not None and rows is not None:
            span.generation = max(span.generation, rows.generation)  # the copy on the host may come back, too

    def commit_insert_component_data(
        self, node, is_new_leaf: bool, params: InsertParams, result: InsertResult, cache_actions
    ) -> None:
        if is_new_leaf:
            self._adopt(node, result.prefix_len, getattr(params, "tail_replay", None))

    def cleanup_after_caching_req(self, req: Req, is_finished: bool, insert_result=None, insert_params=None) -> None:
        rows = getattr(req, "tail_replay", None)
        if rows is not None:
            # Of an unfinished request the tree has this much; rows left below it are copies that it did not need.
            self.release(rows, None if is_finished else req.cache_protected_len)
        if is_finished and req.mamba_pool_idx is not None:
            self.cache.req_to_token_pool.free_mamba_cache(req)

    # ---- hooks of the tree: splitting and deleting ----

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        super().redistribute_on_node_split(new_parent, child)
        self.anchors.split(new_parent, child)
        span = self.span(child)
        if span is not None:
            self._set_span(new_parent, span.split(len(new_parent.key)))
            self._relist(child)

    def discard_deleted_session_leaf(self, node: UnifiedTreeNode) -> None:
        # The one hook that the tree calls for every node it removes.
        super().discard_deleted_session_leaf(node)
        self._drop_rows(node)
        self.anchors.drop(node)

    def forget_nodes(self) -> None:
        """The tree was reset: every span is gone with its node."""
        for node in list(self._holders.values()):
            self._drop_rows(node)
        self.anchors.drop_all()

    # ---- hooks of the tree: locks and tiers, which are FULL's business ----

    def acquire_component_lock(self, node, result, lock_host: bool = False):
        return result

    def release_component_lock(self, *args, **kwargs) -> None:
        pass

    def prepare_load_back(self, *args, **kwargs) -> PrepareLoadBackResult:
        return PrepareLoadBackResult()

    def build_hicache_transfers(self, *args, **kwargs) -> None:
        return None

    def commit_hicache_transfer(self, *args, **kwargs) -> None:
        pass

    def drive_host_eviction(self, *args, **kwargs) -> None:
        pass

    def free_host_values(self, host_values) -> None:
        pass

    # ---- checks ----

    def check_invariants(self) -> None:
        """Recount rows from the live nodes and requests; AssertionError names what is broken."""
        self._release_orphans()
        spans = []
        for node in self.tree_core._node_arena.values():
            span = self.span(node)
            if span is None:
                continue
            assert len(span.ids) == len(node.key), f"node {node.id}: {len(span.ids)} rows for {len(node.key)} tokens"
            held = bool((span.ids != NO_ROW).any())
            assert held == (node.id in self._holders), f"node {node.id}: holds rows {held}, but is listed otherwise"
            spans.append(span.ids)
        for node in self._holders.values():
            assert self.tree_core._node_arena.get(node.id) is node, f"node {node.id} is gone but holds rows"
        self.pool.check_invariants([*spans, *(rows.ids for rows in self._requests)])
        self.anchors.check_invariants(self.tree_core._node_arena, self._requests)
