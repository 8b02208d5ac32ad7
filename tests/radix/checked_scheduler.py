"""SGLang's scheduler without its loop and its model: its own requests, pools, allocation and tree, with our cache.

The forward pass is emulated by writing down what it would compute: the KV slot and the row of a token get the number of
the prefix that ends with this token. A slot or row that is wrong, stale or moved then shows as a wrong number. What the
cache should hold is kept a second time, as a plain dict from prefix to Entry, and compared after every step.
"""

from __future__ import annotations

import dataclasses
from array import array
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch, release_req
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_tailreplay import compat
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.decay_store import cut
from sglang_tailreplay.radix.boundary import GENERATION, RESIDUAL, ROWS_MISSING
from sglang_tailreplay.radix.component import TailReplayComponent
from sglang_tailreplay.radix.decays import LEAST, Decays
from sglang_tailreplay.radix.rows import NO_ROW, RowPool
from sglang_tailreplay.radix.tree import TailReplayCache
from sglang_tailreplay.replay.tail import tail_length
from sglang_tailreplay.replay_rule import EXACT, SEEDED, ZERO
from sglang_tailreplay.request_settings import RATIO_PARAM
from sglang_tailreplay.residual import ResidualBound
from sglang_tailreplay.scheduling import REACH, Admission, Planner, report
from sglang_tailreplay.step import Step, Take, mix

KV_SLOTS = 96
MOST_REQUESTS = 4  # running at the same time; request slots and state slots
CONTEXT = 128
ROOT = 0  # number of the empty prefix
UNWRITTEN = -1
BEHIND = 1 << 16  # a KV slot has the number of its prefix, and so many times the number of replays behind it
CHUNK = 4  # tokens; states inside a pass exist at its multiples
KEEPS_BEYOND = 8  # tokens of a pass that has such states


class Prefixes:
    """Numbers for prefixes: two token sequences have the same number exactly if they are equal."""

    def __init__(self):
        self._numbers: dict[tuple[int, int], int] = {}

    def path(self, tokens, root: int = ROOT) -> list[int]:
        """The numbers of all prefixes of tokens, the shortest (one token) first."""
        numbers = []
        for token in tokens:
            root = self._numbers.setdefault((root, token), len(self._numbers) + 1)
            numbers.append(root)
        return numbers


@dataclasses.dataclass
class Entry:
    """What the tree should know of one cached token."""

    has_row: bool
    generation: int  # replays behind its KV or row; the tree may say more, because it counts per node
    on_device: bool = True  # whether its KV is; otherwise it is on the host


class _Decays:
    """Sums of log-gates. Those of the last pass are on their way until the next one is launched."""

    def __init__(self, rows: int):
        self.sums = np.full((rows, 2), np.nan, dtype=np.float16)
        self.decays = Decays(self.sums)
        self._sent: list[int] = []

    @staticmethod
    def of(path: list[int]) -> np.ndarray:
        """[n, 2]: log-gates of the tokens that these prefixes end with; their sums have no rounding."""
        numbers = np.array(path, dtype=np.int64)
        return -np.stack([numbers * 7 % 5, numbers * 3 % 7], axis=1) / 8

    def passes(self, step: Step, path: list[int]) -> None:
        """A pass has run; prefixes [T] end with its tokens."""
        owners, (members, steps) = self.decays.owners(step.rows), cut(step.tokens)
        g, T = self.of(path), len(path)
        for run in members:
            run = run[run < T]
            here = step.rows[run] != NO_ROW
            self.sums[step.rows[run][here]] = g[run].cumsum(0)[here]
        self._sent.append(self.decays.written(step.rows, steps, owners))

    def look(self) -> None:
        while len(self._sent) > 1:
            self.decays.arrived(self._sent.pop(0))

    def pass_begins(self) -> None:
        if self._sent:
            self.decays.arrived(self._sent[-1])
            self._sent.clear()
        self.decays.check_invariants()


class _Saved:
    """Which anchors are there; nothing is ever on its way, because a slot keeps its state until a pass changes it."""

    def __init__(self, saved: np.ndarray, states: np.ndarray):
        self._saved, self._states = saved, states

    def take_next(self, take: Take) -> None:
        self._saved[take.anchor] = self._states[int(take.slot)]

    def forget(self, anchor: int) -> None:
        self._saved[anchor] = UNWRITTEN

    def whole(self, anchor: int) -> bool:
        return self._saved[anchor] != UNWRITTEN


@dataclasses.dataclass
class Account:
    """What the forward passes have computed for one request, whether or not the scheduler knows it yet."""

    tokens: list[int]  # the prompt and all sampled tokens, those in flight included
    path: list[int]  # the prefix that ends with each of them
    own_rows: set[int] = dataclasses.field(default_factory=set)  # positions whose row is the request's, not the tree's
    generation: int = 0


class Batch(NamedTuple):
    """A launched forward pass whose result the scheduler has not processed."""

    prefills: tuple[Req, ...]
    decodes: tuple[Req, ...]
    middle_chunk: Req | None
    sampled: dict[str, int]  # request -> token


class CheckedScheduler:
    def __init__(self, config: TailReplayConfig, rows: int, overlap: bool, anchors: int = 0):
        _publish_server_args()
        self.overlap = overlap
        # Whether every replay so far was of its whole prefix.
        self.exact = config.mode == "replay" and config.ratio == 1.0 and config.max_tokens is None
        self.request_pool = _request_pool()
        self.allocator = TokenToKVPoolAllocator(KV_SLOTS, torch.float32, "cpu", None, need_sort=False)
        self.cache = _cache(self.request_pool, self.allocator, rows, anchors)
        self.admissions = []
        self.planner = Planner(config, self.admissions.append)
        self.decays = _Decays(rows) if config.max_residual is not None else None
        if self.decays is not None:
            reach = REACH * config.anchor_interval
            self.planner.bound = ResidualBound(
                self.decays.decays, config.max_residual, config.max_tokens, reach, self.decays.look
            )
        self.planner.attach(self.cache)
        # what is in memory: slot or row -> number of the prefix
        self.kv = np.full(KV_SLOTS + 1, UNWRITTEN)
        self.store = np.full(rows, UNWRITTEN)
        self.saved = np.full(anchors, UNWRITTEN)  # anchor -> number of the prefix whose state it is
        self.states = np.full(MOST_REQUESTS + 1, UNWRITTEN)  # state slot -> number of the prefix whose state it has
        self.planner.saved, self.planner.chunk = _Saved(self.saved, self.states), CHUNK
        self.planner.keeps_beyond = KEEPS_BEYOND if anchors else None
        # what should be
        self.prefixes = Prefixes()
        self.truth: dict[int, Entry] = {}
        self.locked: set[int] = set()  # prefixes in locked nodes, when the tree was last read
        self.generations: dict[int, int] = {}  # what the tree says of every prefix, when it was last read
        self.accounts: dict[str, Account] = {}
        # SGLang's queues
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self.abort_chunked = False
        self.chosen: list[Req] = []  # for the prefill that is being put together
        self.last: Batch | None = (
            None  # the last forward pass; with overlap its result is processed after the next launch
        )

    # ---- requests ----

    def arrive(self, prompt: list[int], max_new_tokens: int, ratio: float | None = None, plain: bool = True) -> Req:
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            custom_params=None if ratio is None else {RATIO_PARAM: ratio},
        )
        sampling.normalize(None)
        req = Req(f"r{len(self.accounts)}", "", array("q", prompt), sampling, vocab_size=1 << 20)
        if not plain:
            req.multimodal_inputs = SimpleNamespace(mrope_positions=None)
        self.accounts[req.rid] = Account(list(prompt), self.prefixes.path(prompt))
        self.exact = self.exact and ratio in (None, 1.0)
        self.waiting.append(req)
        return req

    @property
    def admitted(self) -> list[Req]:
        """Requests that hold KV, a request slot and a state slot."""
        last = (*self.last.prefills, *self.last.decodes) if self.last else ()
        chunked = (self.chunked,) if self.chunked else ()
        known = {req.rid: req for req in (*self.running, *self.chosen, *last, *chunked)}
        return [req for req in known.values() if req.kv is not None]

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.chunked or self.last)

    def path(self, req: Req, n: int | None = None) -> list[int]:
        return self.accounts[req.rid].path[:n]

    # ---- one turn of the scheduler's loop ----

    def prefill(self, budget: int, sample, mixed: bool = False) -> None:
        """Prefill at most `budget` tokens; mixed: let the running requests decode in the same pass."""
        self._begin_turn()
        reqs, middle_chunk = self._choose_prefills(budget)
        decodes = []
        if reqs and mixed:
            decodes = list(self.running) if len(self.running) <= self.free_kv - _tokens(reqs) else []
        self._end_turn(self._launch(reqs, decodes, middle_chunk, sample) if reqs else None)

    def decode(self, sample, retract: int = 0) -> None:
        """One token for every running request, after taking `retract` of them back, or more if memory is short."""
        self._begin_turn()
        while self.running and (retract > 0 or len(self.running) > self.free_kv):
            self._retract(self.running.pop())
            retract -= 1
        self._end_turn(self._launch([], list(self.running), None, sample) if self.running else None)

    def drain(self) -> None:
        """A turn in which nothing is launched."""
        self._begin_turn()
        self._end_turn(None)

    def settle(self) -> None:
        """What the device has to do is done."""

    def _begin_turn(self) -> None:
        if self.abort_chunked and self.chunked is not None:
            self.chunked.finished_reason = FINISH_ABORT()
            self._release(self.chunked, is_insert=False)
            self.chunked = None
        self.abort_chunked = False
        if self.chunked is not None and self.chunked.extend_range.end > len(self.chunked.prefix_indices):
            self._cache_unfinished(self.chunked, chunked=True)
        if self.last is not None:
            self.running += [req for req in self.last.prefills if req is not self.last.middle_chunk]
        self.running = [req for req in self.running if not req.finished()]

    def _end_turn(self, batch: Batch | None) -> None:
        before, self.last, self.chosen = self.last, batch, []
        ended = before if self.overlap else batch
        if ended is not None:
            self._process(ended)
        self.running = [req for req in self.running if not req.finished()]

    @property
    def free_kv(self) -> int:
        return self.allocator.available_size() + self._evictable

    @property
    def _evictable(self) -> int:
        return self.cache.tree_core.component_evictable_size_[ComponentType.FULL]

    def _choose_prefills(self, budget: int) -> tuple[list[Req], Req | None]:
        """PrefillAdder: the chunked request goes on, then new ones, until the budget cuts one."""
        self.chosen = chosen = []
        if self.chunked is not None:
            req = self.chunked
            req.init_next_round_input()
            left = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
            n = min(left, budget, self.free_kv)
            if n == 0:
                return [], None
            req.set_extend_range(len(req.prefix_indices), len(req.prefix_indices) + n)
            chosen.append(req)
            if n < left:
                req.inflight_middle_chunks += 1
                return chosen, req
            self.chunked = None
            budget -= n
        for req in list(self.waiting):
            if budget <= 0 or len({*self.admitted, *chosen}) == MOST_REQUESTS:
                break
            if not self._admit(req, budget, reserved=_tokens(chosen)):
                break
            self.waiting.remove(req)
            chosen.append(req)
            budget -= req.extend_range.length
            if req.extend_range.end < len(req.full_untruncated_fill_ids):
                self.chunked = req
                req.inflight_middle_chunks += 1
                return chosen, req
        return chosen, None

    def _admit(self, req: Req, budget: int, reserved: int) -> bool:
        """Match, lock, take what the budget allows. False, and the request waits on, if there is no memory."""
        self.match(req)
        lock = self.cache.inc_lock_ref(req.last_node)
        n = min(len(req.full_untruncated_fill_ids) - len(req.prefix_indices), budget)
        if reserved + n > self.free_kv:
            self.cache.dec_lock_ref(req.last_node, lock.to_dec_params())
            return False
        req.skip_lock_node_ids = {}
        req.set_extend_range(len(req.prefix_indices), len(req.prefix_indices) + n)
        return True

    def match(self, req: Req) -> None:
        """What the scheduler does with a waiting request, any number of times. The boundary must be the longest."""
        ids = list(req.origin_input_ids) + list(req.output_ids)
        assert ids == self.accounts[req.rid].tokens
        matched, usable = self._boundary(req, ids)
        req.init_next_round_input(self.cache)
        cached = len(req.prefix_indices) + req.host_hit_length
        bounded = self.decays is not None and cached < usable  # what is served is looked at when it is
        assert cached == usable or bounded, f"cached {cached} tokens, not {usable} of {matched}"
        usable = cached
        by = (
            RESIDUAL
            if bounded
            else GENERATION
            if usable == self._within_limit(self.prefixes.path(ids[:matched]))
            else ROWS_MISSING
        )
        shrunk = (matched, usable, by) if usable < matched else None
        assert req.tail_replay_shrunk == (shrunk if self._reusable(req) else None)
        self.check()

    def _reusable(self, req: Req) -> bool:
        return req.multimodal_inputs is None

    def _boundary(self, req: Req, ids: list[int]) -> tuple[int, int]:
        """(matched, usable) by trying every boundary on the truth."""
        path = self.prefixes.path(ids[:-1])
        matched = next((i for i, prefix in enumerate(path) if prefix not in self.truth), len(path))
        return matched, self._usable(req, path[:matched], range(matched + 1))

    def _usable(self, req: Req, path: list[int], boundaries) -> int:
        """The longest of the boundaries that can be used of a match on path."""
        limit = self._within_limit(path) if self._reusable(req) else 0
        zero = self.planner.config.mode == "zero"
        has_row = [zero or self.truth[prefix].has_row for prefix in path]
        return max(b for b in boundaries if b <= limit and all(has_row[b - self._tail(req, b) : b]))

    def _within_limit(self, path: list[int]) -> int:
        most = self.planner.config.max_generation
        over = (i for i, prefix in enumerate(path) if most is not None and self.generations[prefix] > most)
        return next(over, len(path))

    def _tail(self, req: Req, m: int) -> int:
        config = self.planner.config
        params = req.sampling_params.custom_params or {}
        return tail_length(m, params.get(RATIO_PARAM, config.ratio), config.min_tokens, config.max_tokens)

    # ---- launching a forward pass ----

    def _launch(self, prefills: list[Req], decodes: list[Req], middle_chunk: Req | None, sample) -> Batch:
        step = self._extend(prefills) if prefills else None
        if decodes:
            decoding = self._decode(decodes)
            step = mix(step, decoding) if prefills else decoding
        self._forward(step, prefills, decodes)
        sampled = {req.rid: sample() for req in (*prefills, *decodes) if req is not middle_chunk}
        for rid, token in sampled.items():
            account = self.accounts[rid]
            account.tokens.append(token)
            account.path += self.prefixes.path([token], account.path[-1])
        return Batch(tuple(prefills), tuple(decodes), middle_chunk, sampled)

    def _extend(self, reqs: list[Req]) -> Step:
        batch = self._sglang_batch(reqs)
        batch.prefix_lens = [len(req.prefix_indices) for req in reqs]
        batch.extend_lens = [req.extend_range.length for req in reqs]
        batch.extend_num_tokens = _tokens(reqs)
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([req.extend_range.end for req in reqs])
        short = batch.extend_num_tokens > self.allocator.available_size()
        alloc_for_extend(batch)
        for req in reqs:
            req.kv_committed_len = req.extend_range.end
            req.is_retracted = False
        self._check_tree(evicts_kv=short)
        fresh = [req for req in reqs if req.mamba_needs_clear]
        step = self._plan(lambda: self.planner.plan_extend(reqs), batch.extend_num_tokens)
        self._check_hits(step, fresh)
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, reqs)
        return step

    def _decode(self, reqs: list[Req]) -> Step:
        for req in reqs:
            req._refresh_fill_ids()
            req.set_extend_range(len(req.full_untruncated_fill_ids) - 1, len(req.full_untruncated_fill_ids))
        batch = self._sglang_batch(reqs)
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([req.kv_committed_len for req in reqs])
        short = len(reqs) > self.allocator.available_size()
        alloc_for_decode(batch, token_per_req=1)
        for req in reqs:
            req.kv_committed_len += 1
        self._check_tree(evicts_kv=short)
        return self._plan(lambda: self.planner.plan_decode(reqs), len(reqs))

    def _sglang_batch(self, reqs: list[Req]) -> SimpleNamespace:
        """The part of a ScheduleBatch that SGLang's allocation reads."""
        return SimpleNamespace(
            reqs=reqs,
            req_to_token_pool=self.request_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            device="cpu",
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_pool_indices=torch.tensor([req.req_pool_idx or 0 for req in reqs]),
        )

    def _plan(self, plan, tokens: int) -> Step:
        short = tokens > self.cache.rows.pool.free_rows
        step = plan()
        assert len(step.rows) == tokens
        given = step.rows[step.rows != NO_ROW]
        assert len(set(given.tolist())) == len(given)
        self._check_tree(evicts_rows=short)
        return step

    def _check_hits(self, step: Step, fresh: list[Req]) -> None:
        """Every request with a fresh state slot and cached tokens gets the rows of its tail, and the right ones."""
        admissions, self.admissions[:] = list(self.admissions), []
        assert len(admissions) == len(fresh)
        hits = {hit.rid: hit for hit in step.hits}
        assert len(hits) == len(step.hits)
        for req, admission in zip(fresh, admissions, strict=True):
            m = len(req.prefix_indices)
            k = self._tail(req, m) if self.planner.config.mode == "replay" else 0
            hit = hits.pop(req.rid, None)
            assert (hit is not None) == (k > 0)
            path = self.path(req, m)
            if hit is not None and self.decays is not None:
                k = self._check_residual(admission, k, path)
            if hit is not None and admission.start == EXACT:
                reach = max(k, REACH * self.planner.config.anchor_interval)
                if self.decays is not None:
                    reach = max(reach, self.planner.config.max_tokens or m)
                k = admission.replayed
                assert k <= reach, "replayed too much"
                assert hit.anchor is not None or k == m, "neither all of the prefix nor from an anchor"
                assert hit.anchor is None or self.saved[hit.anchor] == path[m - k - 1], "of another prefix"
            elif hit is not None and hit.anchor is not None:
                assert self.saved[hit.anchor] in path[: m - k], "a seed lies in its tail or is of another prefix"
            assert (admission.matched, admission.replayed) == (m, k)
            assert admission.anchored == (hit is not None and hit.anchor is not None)
            inexact = SEEDED if admission.anchored else ZERO
            assert admission.start == inexact or k == m or admission.anchored, "it says that it is exact"
            assert report(req).get("tail_replay_matched", 0) == m
            self._start_account(req, m, admission.start == EXACT)
            if hit is not None:
                assert hit.slot == req.mamba_pool_idx
                assert hit.token_ids.tolist() == self.accounts[req.rid].tokens[m - k : m]
                assert self.store[hit.rows].tolist() == path[m - k :], "a row of the tail is wrong, stale or moved"
                assert not set(hit.rows.tolist()) & set(step.rows.tolist()), "a row of a tail was given away"
        assert not hits

    def _check_residual(self, admission: Admission, k: int, path: list[int]) -> int:
        """A hit leaves no more out than it says, nor than it may. The tail that it may have instead of the usual k."""
        most = self.planner.config.max_residual
        if admission.start == EXACT:
            assert admission.residual == 0
            return k
        left_out = np.exp(self.decays.of(path)[len(path) - admission.replayed :].sum(0).max())
        assert left_out <= admission.residual * (1 + LEAST) and admission.residual <= most * (1 + LEAST)
        assert admission.replayed >= k
        return admission.replayed

    def _start_account(self, req: Req, m: int, exact: bool) -> None:
        account = self.accounts[req.rid]
        behind = max((self.truth[prefix].generation for prefix in self.path(req, m)), default=0)
        most = self.planner.config.max_generation
        assert most is None or behind <= most, "a hit took tokens behind too many replays"
        account.generation = behind + (0 < m and not exact)
        assert not account.own_rows
        assert req.tail_replay.generation >= account.generation
        assert most is None or req.tail_replay.generation <= most + 1, "an answer has too many replays behind it"

    def _forward(self, step: Step, prefills: list[Req], decodes: list[Req]) -> None:
        """Write the KV and the row of every token; attention reads the KV before it."""
        self.planner.pass_begins()
        if self.decays is not None:
            self.decays.pass_begins()
        pieces = [(req, len(req.prefix_indices), req.kv_committed_len) for req in prefills]
        pieces += [(req, req.kv_committed_len - 1, req.kv_committed_len) for req in decodes]
        rows = iter(step.rows.tolist())
        plain_without_row = False
        for req, begin, end in pieces:
            path = self.path(req, end)
            slots = self.request_pool.req_to_token[req.req_pool_idx, :end].numpy()
            generation = self.accounts[req.rid].generation
            self._write_kv(slots[begin:], [prefix + generation * BEHIND for prefix in path[begin:]])
            assert self._read_kv(slots) == path, "attention would read another prefix's KV"
            behind = max(self._read_slots(slots)) // BEHIND
            assert behind <= generation, "attention would read KV behind too many replays"
            for position in range(begin, end):
                row = next(rows)
                if row != NO_ROW:
                    assert self._reusable(req) or req in decodes, "a row for a token whose id may be a stand-in"
                    self.store[row] = path[position]
                    self.accounts[req.rid].own_rows.add(position)
                else:
                    plain_without_row |= self._reusable(req)
        assert next(rows, None) is None
        if self.decays is not None and (step.rows != NO_ROW).any():
            self.decays.passes(step, [prefix for req, begin, end in pieces for prefix in self.path(req, end)[begin:]])
        self._save(step, pieces)
        if plain_without_row:
            spare = [prefix for prefix, entry in self.truth.items() if entry.has_row and prefix not in self.locked]
            assert not spare, "a token went without a row although rows could be evicted"
        self.check()

    def _save(self, step: Step, pieces: list) -> None:
        """The states in the slots when the pass has run, and those that it went through."""
        assert not step.keeps or len(step.rows) > KEEPS_BEYOND
        for keep in step.keeps:
            req, begin, end = pieces[keep.request]
            position = begin + keep.chunk * CHUNK
            assert begin < position < end, "no state at the end of a pass, or of what another pass computes"
            assert req.tail_replay.anchors[position].id == keep.anchor, "a state was saved for another position"
            self.saved[keep.anchor] = self.path(req, position)[-1]
        ends = {int(req.mamba_pool_idx): (req, end) for req, _, end in pieces}
        for slot, (req, end) in ends.items():
            self.states[slot] = self.path(req, end)[-1]
        given = [take.anchor for take in step.takes] + [keep.anchor for keep in step.keeps]
        assert len(set(given)) == len(given)
        for take in step.takes:
            req, end = ends[int(take.slot)]
            anchor = req.tail_replay.anchors.get(end)
            assert anchor is not None and anchor.id == take.anchor, "a state was saved for another position"
            self.saved[take.anchor] = self.path(req, end)[-1]

    def _write_kv(self, slots: np.ndarray, numbers: list[int]) -> None:
        self.kv[slots] = numbers

    def _read_slots(self, slots: np.ndarray) -> list[int]:
        return self.kv[slots].tolist()

    def _read_kv(self, slots: np.ndarray) -> list[int]:
        """The prefixes whose KV it is."""
        return [number % BEHIND if number >= 0 else UNWRITTEN for number in self._read_slots(slots)]

    # ---- processing its result ----

    def _process(self, batch: Batch) -> None:
        for req in (*batch.prefills, *batch.decodes):
            if req is batch.middle_chunk:
                req.inflight_middle_chunks -= 1
                continue
            if req.finished() or req.is_retracted:
                continue  # the step that overlap scheduling ran too many
            req.output_ids.append(batch.sampled[req.rid])
            req.update_finish_state()
            if req.finished():
                self._release(req, is_insert=True)
            elif req in batch.prefills:
                self._cache_unfinished(req, chunked=False)

    def _cache_unfinished(self, req: Req, chunked: bool) -> None:
        inserted = self._insertable(req, req.extend_range.end)
        self.cache.cache_unfinished_req(req, chunked=chunked)
        self._expect_inserted(req, inserted)
        assert len(req.prefix_indices) == req.extend_range.end
        self.check()

    def _release(self, req: Req, is_insert: bool) -> None:
        inserted = self._insertable(req, req.kv_committed_len)
        release_kv_cache(req, self.cache, is_insert=is_insert)
        if is_insert:
            self._expect_inserted(req, inserted)
        self._forget(req)

    def _insertable(self, req: Req, n: int) -> int:
        """How many of the first n tokens go to the tree: up to one that the tree has of a later generation."""
        path, generation = self.path(req, n), req.tail_replay.generation
        worse = (i for i in range(req.cache_protected_len, n) if self.generations.get(path[i], 0) > generation)
        return next(worse, n)

    def _expect_inserted(self, req: Req, n: int) -> None:
        account = self.accounts[req.rid]
        for position, prefix in enumerate(self.path(req, n)):
            offered = position in account.own_rows
            entry = self.truth.setdefault(prefix, Entry(False, account.generation))
            if offered and not entry.has_row:
                entry.has_row = True
                entry.generation = max(entry.generation, account.generation)
        account.own_rows = {position for position in account.own_rows if position >= n}

    def _retract(self, req: Req) -> None:
        release_req(
            req=req,
            remaing_req_count=0,
            server_args=SimpleNamespace(disaggregation_mode="null"),
            req_to_token_pool=self.request_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )
        # What is in flight for it is thrown away.
        account = self.accounts[req.rid]
        account.tokens = list(req.origin_input_ids) + list(req.output_ids)
        account.path = self.prefixes.path(account.tokens)
        self.waiting.insert(0, req)
        self._forget(req)

    def _forget(self, req: Req) -> None:
        self.accounts[req.rid].own_rows.clear()
        assert req.kv is None and req.req_pool_idx is None and req.mamba_pool_idx is None
        assert len(req.tail_replay.ids) == 0, "a released request still has rows"
        assert not req.tail_replay.anchors, "a released request still has anchors"
        self.check()

    # ---- operator's and users' actions ----

    def abort(self, index: int) -> None:
        reqs = [*self.waiting, *([self.chunked] if self.chunked else []), *self.running]
        if not reqs:
            return
        req = reqs[index % len(reqs)]
        if req in self.waiting:
            self.waiting.remove(req)
        elif req is self.chunked:
            self.abort_chunked = True
        else:
            req.to_finish = FINISH_ABORT()

    def evict_kv(self, n: int) -> None:
        self.cache.evict(EvictParams(num_tokens=n))
        self.check(evicts_kv=True)

    def flush(self) -> None:
        assert self.idle
        self.cache.reset()
        self.request_pool.clear()
        self.allocator.clear()
        self.truth.clear()
        assert self.cache.rows.pool.used_rows == self.cache.rows.anchors.pool.used_rows == 0
        self.check()

    def lose(self, index: int) -> Req:
        """Give back by hand what SGLang knows of a running request, as a path that passes by the tree would.

        The caller drops the returned reference, the last one; only then are the rows free.
        """
        assert self.last is None
        req = self.running.pop(index % len(self.running))
        kv = self.request_pool.req_to_token[req.req_pool_idx, req.cache_protected_len : req.kv.kv_allocated_len]
        self.allocator.free(kv.to(torch.int64))
        self.cache._dec_req_lock(req)
        self.request_pool.free_mamba_cache(req)
        self.request_pool.free(req)
        req.kv = None
        self.accounts[req.rid].own_rows.clear()
        return req

    # ---- checks ----

    def check(self, evicts_kv: bool = False, evicts_rows: bool = False) -> None:
        """All that must hold between two steps."""
        self._check_tree(evicts_kv, evicts_rows)
        reqs = self.admitted
        self._check_kv(reqs)
        self._check_slots(reqs)
        self._check_rows(reqs)

    def _protected(self) -> set[int]:
        """Prefixes that lie under a running request."""
        return {prefix for req in self.admitted for prefix in self.path(req, req.cache_protected_len)}

    def _check_tree(self, evicts_kv: bool = False, evicts_rows: bool = False) -> None:
        """The tree holds what the truth says; what it may have evicted is taken from the truth."""
        self.cache.sanity_check()
        found = self._read_tree()
        self.generations = {prefix: entry.generation for prefix, entry in found.items()}
        gone = self.truth.keys() - found.keys()
        assert not found.keys() - self.truth.keys(), "the tree has tokens that nobody inserted"
        assert evicts_kv or not any(self.truth[prefix].on_device for prefix in gone), "the tree lost tokens"
        for prefix in gone:
            del self.truth[prefix]
        demoted = {prefix for prefix, entry in self.truth.items() if entry.on_device and not found[prefix].on_device}
        assert evicts_kv or not demoted, "tokens left the device"
        for prefix in demoted:
            self.truth[prefix].on_device = False
        lost = {prefix for prefix, entry in self.truth.items() if entry.has_row and not found[prefix].has_row}
        assert evicts_rows or not lost, "the tree lost rows"
        for prefix in lost:
            self.truth[prefix].has_row = False
        assert not (gone | demoted | lost) & self._protected(), "something under a running request was evicted"
        for prefix, entry in self.truth.items():
            assert found[prefix].on_device == entry.on_device, "the tree has KV on the device that nobody put there"
            assert found[prefix].has_row == entry.has_row, "the tree has a row that nobody gave it"
            assert found[prefix].generation >= entry.generation
            assert not self.exact or found[prefix].generation == 0

    def _read_tree(self) -> dict[int, Entry]:
        """Every cached token, with its KV slot and row checked against the memory."""
        found: dict[int, Entry] = {}
        self.locked = set()
        todo = [(self.cache.root_node, ROOT)]
        while todo:
            node, prefix = todo.pop()
            for child in node.children.values():
                path = self.prefixes.path(child.key, prefix)
                todo.append((child, path[-1]))
                span = self.cache.rows.span(child)
                rows = span.ids if span is not None else np.full(len(path), NO_ROW)
                generation = span.generation if span is not None else 0
                self._check_node_kv(child, path)
                full = child.component_data[ComponentType.FULL]
                self.locked.update(path if full.lock_ref > 0 else ())
                on_device = full.value is not None
                has = rows != NO_ROW
                assert self.store[rows[has]].tolist() == np.array(path)[has].tolist(), "a cached row was overwritten"
                for offset, anchor in self.cache.rows.anchors.of(child).items():
                    assert self.saved[anchor.id] == path[offset - 1], "a cached state was overwritten"
                    assert anchor.generation <= generation, "a state has more replays behind it than its tokens"
                found |= {p: Entry(bool(h), generation, on_device) for p, h in zip(path, has, strict=True)}
        return found

    def _check_node_kv(self, node, path: list[int]) -> None:
        slots = node.component_data[ComponentType.FULL].value.numpy()
        assert self._read_kv(slots) == path, "a cached KV slot was overwritten"

    def _check_kv(self, reqs: list[Req]) -> None:
        """available + evictable + protected + held by running requests == size"""
        held = sum(req.kv.kv_allocated_len - req.cache_protected_len for req in reqs)
        protected = self.cache.tree_core.component_protected_size_[ComponentType.FULL]
        assert self.allocator.available_size() + self._evictable + protected + held == KV_SLOTS
        assert protected + self._evictable == sum(entry.on_device for entry in self.truth.values())

    def _check_slots(self, reqs: list[Req]) -> None:
        every = list(range(1, MOST_REQUESTS + 1))
        states = self.request_pool.mamba_allocator.free_slots.tolist()
        assert sorted(states + [int(req.mamba_pool_idx) for req in reqs]) == every
        assert sorted(self.request_pool.free_slots + [req.req_pool_idx for req in reqs]) == every

    def _check_rows(self, reqs: list[Req]) -> None:
        """Rows lie in the tree or with running requests, where the account says, and nowhere else."""
        self.cache.check_invariants()
        used = sum(entry.has_row for entry in self.truth.values())
        for req in reqs:
            rows, own = req.tail_replay, self.accounts[req.rid].own_rows
            has = {rows.start + int(i): row for i, row in enumerate(rows.ids.tolist()) if row != NO_ROW}
            assert has.keys() == own, "a request's rows are not those that it was given and did not hand over"
            path = self.path(req, rows.end)
            assert all(self.store[row] == path[position] for position, row in has.items())
            used += len(has)
            for position, anchor in rows.anchors.items():
                assert self.saved[anchor.id] == self.path(req, position)[-1], "a request's state was overwritten"
        assert used == self.cache.rows.pool.used_rows


def serve(server: CheckedScheduler, prompt: list[int], answer: int = 1) -> Req:
    """One request from its arrival to its end."""
    req = server.arrive(prompt, answer)
    finish(server)
    return req


def finish(server: CheckedScheduler) -> None:
    while not server.idle:
        server.prefill(64, lambda: 1)
        server.decode(lambda: 1)


def _tokens(reqs: list[Req]) -> int:
    return sum(req.extend_range.length for req in reqs)


def _publish_server_args() -> None:
    """SGLang's requests and pools read settings from the process-wide context."""
    get_context().set_server_args(ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native"))


def _request_pool() -> HybridReqToTokenPool:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=4, n_groups=1, num_heads=1, head_dim=4, state_size=4, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=MOST_REQUESTS,
        mamba_size=MOST_REQUESTS,
        mamba_spec_state_size=0,
        max_context_len=CONTEXT,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=False,
    )


def _cache(
    request_pool: HybridReqToTokenPool, allocator: TokenToKVPoolAllocator, rows: int, anchors: int
) -> TailReplayCache:
    params = CacheInitParams(
        disable=False, req_to_token_pool=request_pool, token_to_kv_pool_allocator=allocator, page_size=1
    )
    cache = compat.create_cache(SimpleNamespace(params=params), TailReplayCache, TailReplayComponent)
    cache.rows.set_pool(RowPool(rows), RowPool(anchors))
    return cache
