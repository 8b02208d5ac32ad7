"""Which tree node has which anchors: recurrent states saved on the host.

An anchor refines the cached prefix that it lies in: with the rows behind it, the state at any later token can be
rebuilt exactly. It moves with its node through splits and tiers and is freed with it. Pure bookkeeping; nodes are
SGLang's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tailreplay.radix.rows import Anchor, RequestRows, RowPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

_ANCHORS = "tail_replay_anchors"


class NodeAnchors:
    """Anchors in the nodes' metadata, by offset: that at offset o is the state after the node's first o tokens."""

    def __init__(self, component_type: Any, pool: RowPool):
        self._component_type = component_type
        self.pool = pool
        self._holders: dict[int, UnifiedTreeNode] = {}

    def of(self, node: UnifiedTreeNode) -> dict[int, Anchor]:
        """By offset, 1 to the node's length. Not to be changed by the caller."""
        return node.component_data[self._component_type].metadata.get(_ANCHORS, {})

    def _set(self, node: UnifiedTreeNode, anchors: dict[int, Anchor]) -> None:
        node.component_data[self._component_type].metadata[_ANCHORS] = anchors
        if anchors:
            self._holders[node.id] = node
        else:
            self._holders.pop(node.id, None)

    def before(self, node: UnifiedTreeNode, m: int) -> Iterator[tuple[int, Anchor]]:
        """(position, anchor) on the path to the node, which ends at token m; the newest first."""
        end = m
        while end > 0:
            begin = end - len(node.key)
            for offset in sorted(self.of(node), reverse=True):
                yield begin + offset, self.of(node)[offset]
            node, end = node.parent, begin

    def alloc(self, spared: Collection[int] = ()) -> int | None:
        """A place for an anchor. In a full store that of the node used longest ago, but none that is `spared`: a hit is
        about to begin there. None if there is none to be had."""
        if self.pool.free_rows == 0:
            self._evict_one(spared)
        ids = self.pool.alloc(1)
        return int(ids[0]) if len(ids) else None

    def _evict_one(self, spared: Collection[int]) -> None:
        def offsets(node: UnifiedTreeNode) -> list[int]:
            return [offset for offset, anchor in self.of(node).items() if anchor.id not in spared]

        nodes = [node for node in self._holders.values() if not spared or offsets(node)]
        if nodes:
            node = min(nodes, key=lambda node: node.last_access_time)
            anchors = dict(self.of(node))
            self.free({0: anchors.pop(min(offsets(node)))})
            self._set(node, anchors)

    def free(self, anchors: Mapping[int, Anchor]) -> None:
        self.pool.free(np.array([anchor.id for anchor in anchors.values()], dtype=np.int64))

    def adopt(self, node: UnifiedTreeNode, begin: int, rows: RequestRows, most: int) -> None:
        """The node, whose tokens are [begin, begin + len(key)) of an inserted request, takes the anchors it lacks.

        None of a generation above `most`, the node's own: what is built on a hit has no more than its tokens tell.
        """
        offered = rows.take_anchors(begin, begin + len(node.key))
        if not offered:
            return
        anchors = dict(self.of(node))
        for position, anchor in offered.items():
            here = anchors.get(position - begin)
            if anchor.generation <= most and (here is None or anchor.generation < here.generation):
                anchors[position - begin], anchor = anchor, here
            if anchor is not None:
                self.free({0: anchor})
        self._set(node, anchors)

    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """The child's first tokens have become a node of their own."""
        cut, anchors = len(new_parent.key), self.of(child)
        if anchors:
            self._set(new_parent, {o: anchor for o, anchor in anchors.items() if o <= cut})
            self._set(child, {o - cut: anchor for o, anchor in anchors.items() if o > cut})

    def drop(self, node: UnifiedTreeNode) -> None:
        self.free(self.of(node))
        self._set(node, {})

    def drop_all(self) -> None:
        for node in list(self._holders.values()):
            self.drop(node)

    def check_invariants(self, nodes: Mapping[int, UnifiedTreeNode], requests: Iterable[RequestRows]) -> None:
        """Recount from the live nodes and requests; AssertionError names what is broken."""
        owned = []
        for node in nodes.values():
            anchors = self.of(node)
            assert all(0 < o <= len(node.key) for o in anchors), f"node {node.id}: anchors at {sorted(anchors)}"
            assert bool(anchors) == (node.id in self._holders), f"node {node.id}: anchors are listed otherwise"
            owned += [anchor.id for anchor in anchors.values()]
        for node in self._holders.values():
            assert nodes.get(node.id) is node, f"node {node.id} is gone but holds anchors"
        owned += [anchor.id for rows in requests for anchor in rows.anchors.values()]
        self.pool.check_invariants([np.array(owned, dtype=np.int64)])
