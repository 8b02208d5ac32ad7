"""What a batch needs beyond SGLang's own fields: a row for each of its tokens, a tail for each of its hits.

Runs on the scheduler thread, integers only. The result, a Step, rides on the ScheduleBatch to the forward pass.

    # a hit on m of n tokens:  [0, m-k) KV reused   [m-k, m) KV reused, state replayed   [m, n) ordinary prefill

The replay begins at zero, or at an anchor: the state after m-k tokens, saved on the host when they were computed.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.pass_anchors import Keep, positions_inside
from sglang_tailreplay.radix.boundary import ROWS_MISSING, Shrunk
from sglang_tailreplay.radix.rows import NO_ROW, Anchor, RequestRows, no_rows
from sglang_tailreplay.replay.segments import CHUNK
from sglang_tailreplay.replay.tail import tail_length
from sglang_tailreplay.replay_rule import EXACT, ZERO, Begin, begin
from sglang_tailreplay.request_settings import limit_of, ratio_of
from sglang_tailreplay.residual import Prefix, ResidualBound
from sglang_tailreplay.step import Hit, Sample, Step, Take, Tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_tailreplay.radix.component import Tail
    from sglang_tailreplay.radix.tree import TailReplayCache

REACH = 2  # intervals that a replay from an anchor may span, if a tail from zero would be shorter
END_SHARE = 4  # at a request's end, where its next turn begins, an anchor may lie so many times nearer than an interval


class Saved(Protocol):
    """What becomes of places for anchors (AnchorStore)."""

    def forget(self, anchor: int) -> None:
        """The place was given to a state that is not there yet."""

    def whole(self, anchor: int) -> bool:
        """Whether the state that it was given to is there."""

    def take_next(self, take: Take) -> None:
        """Save the state in a slot before the next pass runs; nobody changes it until then."""


class Start(NamedTuple):
    """Where a replay begins."""

    rows: np.ndarray  # [k] int64, from there to the boundary
    anchor: int | None
    generation: int  # of what is computed on top
    kind: str  # of replay_rule
    residual: float | None = None  # None where nobody asks


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """One request that got its first prefill, for the metrics."""

    matched: int
    replayed: int
    shrunk_from: int | None  # the boundary that the tree had, if it was made smaller
    anchored: bool = False  # the replay began at an anchor
    start: str = ZERO  # how it began (replay_rule); says nothing of a miss
    shrunk_by: str = ROWS_MISSING  # or another reason of radix.boundary, if it was
    residual: float | None = None  # of a hit; None where nobody asks
    prompt: int = 0  # tokens


def has_plain_tokens(req: Req) -> bool:
    """Whether token ids alone determine the request's hidden states (no images, no input embeddings)."""
    return req.multimodal_inputs is None and req.input_embeds is None and req.positional_embed_overrides is None


def mark_internal(req: Req) -> None:
    """A request of this project's own: it neither uses the cache nor leaves anything in it."""
    req.tail_replay_internal = True


def is_internal(req: Req) -> bool:
    return getattr(req, "tail_replay_internal", False)


def may_reuse(req: Req) -> bool:
    return has_plain_tokens(req) and not is_internal(req)


class Planner:
    """Gives rows to tokens and tails to hits. One per scheduler."""

    def __init__(self, config: TailReplayConfig, on_admission: Callable[[Admission], None] = lambda admission: None):
        self.config = config
        self.on_admission = on_admission
        # Tokens that a tail of this many may have at no more cost: replays run in graphs of fixed sizes.
        self.rounded: Callable[[int], int] = lambda k: k
        self.is_sampled: Callable[[], bool] = lambda: False  # whether the hit at hand is to be verified
        # Prefill passes over more tokens than this save states inside of them, too; None: no pass does.
        self.keeps_beyond: int | None = None
        self.chunk = CHUNK  # tokens; such states exist at its multiples
        self._begun: frozenset[int] = frozenset()  # anchors of the last prefill's hits: it may not be launched yet
        self._running = True  # whether the pass that was planned last was launched
        self.saved: Saved | None = None  # None: every anchor is there as soon as it has a place
        self.bound: ResidualBound | None = None  # None: whatever a replay leaves out, nobody asks
        self.cache: TailReplayCache | None = None

    def attach(self, cache: TailReplayCache) -> None:
        self.cache = cache
        cache.may_reuse = may_reuse
        cache.tail_length_of = self.tail_length_of
        cache.limit_of = limit_of
        cache.max_generation = self.config.max_generation
        cache.within_bound = self.within_bound if self.bound is not None else None
        cache.rows.before_finish = self.before_finish
        cache.rows.anchors.reach = REACH * self.config.anchor_interval

    @property
    def _needs_tails(self) -> bool:
        return self.config.mode == "replay"

    def tail_length_of(self, req: Req) -> Callable[[int], int] | None:
        """m -> k for this request; None in zero mode, where a hit needs no tail."""
        if not self._needs_tails:
            return None
        ratio = ratio_of(req, self.config)
        return lambda m: tail_length(m, ratio, self.config.min_tokens, self.config.max_tokens)

    def plan_extend(self, reqs: Sequence[Req]) -> Step:
        """Called for a prefill batch after its slots are allocated and before SGLang forgets which slots are fresh."""
        self._running = False
        if any(map(is_internal, reqs)):
            return Step(no_rows(sum(req.extend_range.length for req in reqs)))
        hits = [hit for req in reqs if (hit := self._admit(req)) is not None]
        self._begun = frozenset(hit.anchor for hit in hits if hit.anchor is not None)
        self.cache.rows.anchors.used(self._begun)
        # Tails first: what they need lies under locked nodes, so the rows given out here are never theirs.
        rows = [self._rows_for(req, len(req.prefix_indices), req.extend_range.length) for req in reqs]
        ids = np.concatenate(rows) if rows else no_rows(0)
        keeps = self._keeps(reqs, len(ids))
        takes = self._takes((req, len(req.prefix_indices) + req.extend_range.length) for req in reqs)
        return Step(ids, tuple(hits), takes, _samples(reqs), keeps, self._tokens(reqs))

    def pass_begins(self) -> None:
        """The pass that was planned last is launched."""
        self._running = True
        if self.bound is not None:
            self.bound.pass_begins()

    def _admit(self, req: Req) -> Hit | None:
        """The hit of a request with a fresh state slot; None for chunk continuations and misses."""
        if not req.mamba_needs_clear:
            return None
        rows = self.cache.rows.track(req)
        m = len(req.prefix_indices)
        tail_length = self.tail_length_of(req)
        k = tail_length(m) if m > 0 and tail_length is not None else 0
        node = self.cache.tree_core.node_by_id(req.last_node)
        start = self._start(node, m, k)
        k, rows.generation, rows.anchored = len(start.rows), start.generation, start.anchor is not None
        rows.start_kind = start.kind
        if start.residual is not None:
            rows.residual = max(start.residual, rows.residual or 0.0)
        rows.answer_generation = max(rows.answer_generation, rows.generation)
        rows.boundary, rows.replayed = m, k
        rows.last_anchor = self._last_anchor(node, m)
        shrunk: Shrunk | None = getattr(req, "tail_replay_shrunk", None)
        self.on_admission(
            Admission(
                matched=m,
                replayed=k,
                shrunk_from=shrunk.matched if shrunk else None,
                anchored=rows.anchored,
                start=start.kind,
                shrunk_by=shrunk.reason if shrunk else ROWS_MISSING,
                residual=start.residual,
                prompt=len(req.full_untruncated_fill_ids),
            )
        )
        req.tail_replay_sampled = m > 0 and has_plain_tokens(req) and self.is_sampled()
        if k == 0 and not rows.anchored:
            return None
        assert not (start.rows == NO_ROW).any(), f"request {req.rid}: the tail of a {m}-token hit lost its rows"
        ids = np.array(req.full_untruncated_fill_ids[m - k : m], dtype=np.int64)
        return Hit(req.rid, req.mamba_pool_idx, start.rows, ids, start.anchor)

    def _start(self, node: UnifiedTreeNode, m: int, k: int) -> Start:
        """Of a hit that ends with the node, at token m, with a tail of k: see replay_rule.

        What the request computes inherits the error of what it builds on; an exact replay adds none of its own.
        """
        if k == 0 or not (self.config.anchor_interval or self.bound):
            tail = self._longest_tail(node, m, k)
            kind = EXACT if 0 < m == len(tail.rows) else ZERO
            return Start(tail.rows, None, tail.generation + (m > 0 and kind == ZERO), kind)
        anchors, prefix = self._anchors(node, m), Prefix(self.cache.rows, node, m, m)
        chosen = self._begin(prefix, k, anchors)
        # A tail on top of an older state must not reach back to it.
        longest = chosen.kind == ZERO
        tail = self._longest_tail(node, m, chosen.tail) if longest else self.cache.rows.tail(node, chosen.tail)
        kind = EXACT if longest and len(tail.rows) == m else chosen.kind
        residual = self.bound.residual(prefix, kind, len(tail.rows)) if self.bound else None
        if chosen.anchor is None:
            return Start(tail.rows, None, tail.generation + (kind != EXACT), kind, residual)
        anchor = anchors[chosen.anchor]
        generation = max(tail.generation, anchor.generation) + (kind != EXACT)
        return Start(tail.rows, anchor.id, generation, kind, residual)

    def _begin(self, prefix: Prefix, k: int, anchors: Collection[int]) -> Begin:
        if self.bound is None:
            return begin(prefix.m, k, max(k, REACH * self.config.anchor_interval), anchors, prefix.whole)
        chosen = self.bound.begin(prefix, k, anchors)
        # The match ended where there was one, and its rows and anchors are still there.
        assert chosen is not None, f"a hit on {prefix.m} tokens cannot be within a residual of {self.bound.largest}"
        return chosen

    def _anchors(self, node: UnifiedTreeNode, m: int) -> dict[int, Anchor]:
        """Those on the path to the node, which ends at token m, that are there; by position, the newest first."""
        if not self.config.anchor_interval:
            return {}
        return {
            position: anchor
            for position, anchor in self.cache.rows.anchors.before(node, m)
            if self.saved is None or self.saved.whole(anchor.id)
        }

    def within_bound(self, node: UnifiedTreeNode, end: int, m: int, tail_length: Callable[[int], int]) -> int:
        """See ResidualBound.boundary."""
        return self.bound.boundary(self.cache.rows, node, end, m, tail_length, self._anchors(node, end))

    def _last_anchor(self, node: UnifiedTreeNode, m: int) -> int:
        if not self.config.anchor_interval:
            return 0
        return next((position for position, _ in self.cache.rows.anchors.before(node, m)), 0)

    def _takes(self, ends: Iterable[tuple[Req, int]]) -> tuple[Take, ...]:
        """Anchors of requests that the pass brings to these positions, where the last one is an interval away."""
        takes = []
        for req, position in ends if self.config.anchor_interval else ():
            rows = self.cache.rows.track(req)
            if position - rows.last_anchor < self.config.anchor_interval or not has_plain_tokens(req):
                continue
            place = self._place(rows, position)
            if place is not None:
                takes.append(Take(req.mamba_pool_idx, place))
        return tuple(takes)

    def before_finish(self, req: Req, position: int) -> None:
        """Called before the tree gets the first `position` tokens of a finished request, which still has its slot."""
        interval, rows = self.config.anchor_interval, self.cache.rows.track(req)
        # With overlap scheduling a pass more may have run than the tree is told of, or be planned only (where SGLang
        # processes results between plan and launch): the state is then of other tokens.
        if not interval or self.saved is None or not self._running or rows.end != position or not has_plain_tokens(req):
            return
        if (position - rows.last_anchor) * END_SHARE >= interval and position > rows.last_anchor:
            place = self._place(rows, position)
            if place is not None:
                self.saved.take_next(Take(req.mamba_pool_idx, place))

    def _keeps(self, reqs: Sequence[Req], tokens: int) -> tuple[Keep, ...]:
        """Anchors inside a prefill pass over that many tokens."""
        if not self.config.anchor_interval or self.keeps_beyond is None or tokens <= self.keeps_beyond:
            return ()
        keeps = []
        for i, req in enumerate(reqs):
            rows, begin = self.cache.rows.track(req), len(req.prefix_indices)
            end = begin + req.extend_range.length if has_plain_tokens(req) else begin
            for position in positions_inside(begin, end, rows.last_anchor, self.config.anchor_interval, self.chunk):
                place = self._place(rows, position)
                if place is not None:
                    keeps.append(Keep(i, (position - begin) // self.chunk, place))
        return tuple(keeps)

    def _place(self, rows: RequestRows, position: int) -> int | None:
        """A place for the request's state after `position` tokens; None in a store without places."""
        place = self.cache.rows.anchors.alloc(self._begun)
        if place is not None:
            rows.anchors[position] = Anchor(place, rows.generation)
            rows.last_anchor = position
            if self.saved is not None:
                self.saved.forget(place)
        return place

    def _longest_tail(self, node: UnifiedTreeNode, m: int, k: int) -> Tail:
        """The tail of k tokens, or a longer one that costs the same, if its rows are there."""
        longer = min(m, self.rounded(k), max(k, self.config.max_tokens or m)) if k > 0 else 0
        tail = self.cache.rows.tail(node, longer)
        return tail if longer == k or not (tail.rows == NO_ROW).any() else self.cache.rows.tail(node, k)

    def plan_decode(self, reqs: Sequence[Req]) -> Step:
        """Called for a decode batch after its slots are allocated: one token per request."""
        self._running = False
        component = self.cache.rows
        plain = [has_plain_tokens(req) for req in reqs]
        ids = no_rows(len(reqs))  # for what follows an image: nobody is ever served from it
        ids[plain] = self._alloc(sum(plain))
        for req, row in zip(reqs, ids.tolist(), strict=True):
            rows = component.track(req)
            self._continue_at(rows, req.kv_committed_len - 1)
            rows.append_one(row)
        takes = self._takes((req, req.kv_committed_len) for req in reqs)
        return Step(ids, takes=takes, tokens=self._tokens(reqs, decode=True))

    def _rows_for(self, req: Req, begin: int, n: int) -> np.ndarray:
        """Rows for the tokens [begin, begin + n) of req."""
        rows = self.cache.rows.track(req)
        self._continue_at(rows, begin)
        ids = self._alloc(n) if has_plain_tokens(req) else no_rows(n)
        rows.append(ids)
        return ids

    def _alloc(self, n: int) -> np.ndarray:
        ids = self.cache.rows.alloc(n)
        if self.bound is not None:
            self.bound.decays.given_out(ids)
        return ids

    def _tokens(self, reqs: Sequence[Req], decode: bool = False) -> Tokens | None:
        """Whose the tokens of a planned pass are, the last ones of the requests' rows."""
        if self.bound is None:
            return None
        rows = [self.cache.rows.track(req) for req in reqs]
        lengths = [1 if decode else req.extend_range.length for req in reqs]
        owners = np.repeat(np.array([r.number for r in rows], dtype=np.int64), lengths)
        spans = [np.arange(r.end - n, r.end) for r, n in zip(rows, lengths, strict=True)]
        return Tokens(owners, np.concatenate(spans) if spans else np.empty(0, dtype=np.int64), decode)

    def _continue_at(self, rows: RequestRows, position: int) -> None:
        if rows.end != position:
            # A retracted request starts over, a session's turn starts past what its last turn left.
            self.cache.rows.release(rows)
            rows.restart(position)


def _samples(reqs: Sequence[Req]) -> tuple[Sample, ...]:
    """Of the hits to verify, those whose last chunk this is: the pass gives their next token."""
    samples = []
    for index, req in enumerate(reqs):
        ids = req.full_untruncated_fill_ids
        if getattr(req, "tail_replay_sampled", False) and len(req.prefix_indices) + req.extend_range.length == len(ids):
            req.tail_replay_sampled = False
            samples.append(Sample(index, array("q", ids)))
    return tuple(samples)


def report(req: Req) -> dict[str, int | float | str]:
    """What an answer's meta_info tells, beside SGLang's own `cached_tokens`."""
    rows = getattr(req, "tail_replay", None)
    if rows is None or rows.boundary == rows.answer_generation == 0:
        return {}
    return {
        "tail_replay_matched": rows.boundary,
        "tail_replay_replayed": rows.replayed,
        "tail_replay_generation": rows.answer_generation,
        **({"tail_replay_start": rows.start_kind} if rows.boundary else {}),
        **({"tail_replay_anchored": 1} if rows.anchored else {}),
        **({"tail_replay_residual": rows.residual} if rows.residual is not None else {}),
    }
