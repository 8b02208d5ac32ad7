"""Which tree node has which anchors: recurrent states saved on the host.

An anchor refines the cached prefix that it lies in: with the rows behind it, the state at any later token can be
rebuilt exactly. It moves with its node through splits and tiers and is freed with it, or with the rows that it refines.
Pure bookkeeping; nodes are SGLang's.

All anchors take as many bytes, so a full store gives up the one that saves least: GreedyDual, each worth the tokens
that a hit at it would have to replay more without it (`_worth`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tailreplay.radix.greedy_dual import GreedyDual
from sglang_tailreplay.radix.rows import Anchor, RequestRows, RowPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

_ANCHORS = "tail_replay_anchors"


class NodeAnchors:
    """Anchors in the nodes' metadata, by offset: that at offset o is the state after the node's first o tokens."""

    def __init__(self, component_type: Any, pool: RowPool):
        self._component_type = component_type
        self.pool = pool
        self.reach = 0  # tokens; a replay from an anchor further away than this is not exact
        self.evicted = 0  # so far, to make room
        self._places: dict[int, tuple[UnifiedTreeNode, int]] = {}  # anchor -> its node and its offset there
        self._order = GreedyDual()  # of the anchors in nodes

    def of(self, node: UnifiedTreeNode) -> dict[int, Anchor]:
        """By offset, 1 to the node's length. Not to be changed by the caller."""
        return node.component_data[self._component_type].metadata.get(_ANCHORS, {})

    def _set(self, node: UnifiedTreeNode, anchors: dict[int, Anchor]) -> None:
        """What the node no longer has must have gone to another node, or be freed."""
        node.component_data[self._component_type].metadata[_ANCHORS] = anchors
        for offset, anchor in anchors.items():
            self._places[anchor.id] = (node, offset)
            if anchor.id not in self._order:
                self._order.add(anchor.id)

    def before(self, node: UnifiedTreeNode, m: int) -> Iterator[tuple[int, Anchor]]:
        """(position, anchor) on the path to the node, which ends at token m; the newest first."""
        end = m
        while end > 0:
            begin = end - len(node.key)
            for offset in sorted(self.of(node), reverse=True):
                yield begin + offset, self.of(node)[offset]
            node, end = node.parent, begin

    def used(self, ids: Iterable[int]) -> None:
        """Hits begin at these."""
        for anchor in ids:
            self._order.use(anchor)

    def alloc(self, spared: Collection[int] = ()) -> int | None:
        """A place for an anchor. In a full store that of the one that saves least, but none that is `spared`: a hit is
        about to begin there. None if there is none to be had."""
        if self.pool.free_rows == 0:
            self._evict_one(spared)
        ids = self.pool.alloc(1)
        return int(ids[0]) if len(ids) else None

    def _evict_one(self, spared: Collection[int]) -> None:
        chosen = self._order.pop(self._worth, spared)
        if chosen is not None:
            self.evicted += 1
            self._give_up(*self._places[chosen])

    def _worth(self, anchor: int) -> int:
        """Tokens that a hit at it would have to replay more without it: those behind the anchor before it, or behind
        the start. At most the reach: beyond it nobody replays, so all that is as far costs as much, its exactness."""
        node, offset = self._places[anchor]
        gap, earlier = offset, max((o for o in self.of(node) if o < offset), default=None)
        while earlier is None and gap < self.reach and node.parent is not None:
            node = node.parent
            gap += len(node.key)
            earlier = max(self.of(node), default=None)
        return min(gap - (earlier or 0), self.reach)

    def _give_up(self, node: UnifiedTreeNode, *offsets: int) -> None:
        anchors = dict(self.of(node))
        self.free({offset: anchors.pop(offset) for offset in offsets})
        self._set(node, anchors)

    def free(self, anchors: Mapping[int, Anchor]) -> None:
        for anchor in anchors.values():
            self._places.pop(anchor.id, None)
            self._order.remove(anchor.id)
        self.pool.free(np.array([anchor.id for anchor in anchors.values()], dtype=np.int64))

    def rows_dropped(self, node: UnifiedTreeNode) -> None:
        """The node has no rows any more, which its anchors refined, but for one at its end: no hit reaches them."""
        self._give_up(node, *(offset for offset in self.of(node) if offset < len(node.key)))

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
        self._give_up(node, *self.of(node))

    def drop_all(self) -> None:
        for node in {node.id: node for node, _ in self._places.values()}.values():
            self.drop(node)

    def check_invariants(self, nodes: Mapping[int, UnifiedTreeNode], requests: Iterable[RequestRows]) -> None:
        """Recount from the live nodes and requests; AssertionError names what is broken."""
        owned = []
        for node in nodes.values():
            anchors = self.of(node)
            assert all(0 < o <= len(node.key) for o in anchors), f"node {node.id}: anchors at {sorted(anchors)}"
            for offset, anchor in anchors.items():
                place = self._places.get(anchor.id)
                assert place == (node, offset), f"node {node.id}: its anchor at {offset} is listed at {place}"
            owned += [anchor.id for anchor in anchors.values()]
        gone = self._places.keys() - set(owned)
        assert not gone, f"anchors {sorted(gone)} are listed, but no node has them"
        assert self._places.keys() == set(self._order), "anchors in nodes that are never given up, or others that are"
        self._order.check_invariants()
        owned += [anchor.id for rows in requests for anchor in rows.anchors.values()]
        self.pool.check_invariants([np.array(owned, dtype=np.int64)])
