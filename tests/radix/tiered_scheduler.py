"""CheckedScheduler with SGLang's HiCache: its controller, its host pool and this project's stack, on simulated streams.

KV is in real pools of two full-attention layers. A forward pass writes its KV, and a copy between the tiers reads and
writes, only when its stream gets that far: when somebody waits for it, or when `advance` lets it. What is not written
yet must not be read; what is read too early or written too late is a wrong number later.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import torch
from checked_scheduler import BEHIND, KV_SLOTS, CheckedScheduler
from sglang.srt.managers import cache_controller
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.pool_host import base, common, mha
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from simulated_device import Stream, current_stream, device_module

from sglang_tailreplay import host_tier
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.cpu import host_pool

FULL_LAYERS = (1, 2)  # their numbers in a model whose layer 0 is a GDN layer
LEAST_LOAD = 10  # SGLang loads no fewer tokens


class TieredScheduler(CheckedScheduler):
    def __init__(
        self, config: TailReplayConfig, rows: int, overlap: bool, host_ratio: float, policy: str = "write_through"
    ):
        super().__init__(config, rows, overlap)
        _use_simulated_device()
        self.forward_stream = Stream()
        self.in_flight: dict[int, int] = {}  # slot -> prefix whose KV a forward pass has yet to write
        self.loading: set[int] = set()  # slots whose KV is yet to come from the host
        self.pool = _kv_pool(self.request_pool)
        self.buffers = [
            buffer.view(-1).numpy() for buffer in (*self.pool.full_kv_pool.k_buffer, *self.pool.full_kv_pool.v_buffer)
        ]
        self.allocator._kvcache = self.pool
        self.worker = SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None)
        host_tier.attach(self.cache, self._context(host_ratio, policy), self.forward_stream)
        self.controller = self.cache.cache_controller
        self.consumer = -1
        self.loads = True  # a test that makes loads fail says so
        self.early_loads = False  # whether a load runs before the pass that waits for it is launched
        _record_loads(self)

    def _context(self, host_ratio: float, policy: str) -> SimpleNamespace:
        """The part of TreeCacheBuildContext that HiCache reads."""
        server_args = SimpleNamespace(
            hicache_ratio=host_ratio,
            hicache_size=0,
            hicache_write_policy=policy,
            hicache_io_backend="kernel",
            hicache_mem_layout="page_first",
            hicache_storage_backend=None,
            hicache_storage_prefetch_policy="best_effort",
            extra_metric_labels=None,
            served_model_name="m",
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.request_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        return SimpleNamespace(server_args=server_args, params=params, tp_worker=self.worker)

    # ---- the device ----

    def advance(self, forward: int | None, write: int | None, load: int | None) -> None:
        """Let the streams do that many pieces of work; None: all."""
        self.forward_stream.run(forward)
        self.controller.write_stream.run(write)
        self.controller.load_stream.run(load)

    def settle(self) -> None:
        self.advance(None, None, None)

    def _write_kv(self, slots: np.ndarray, numbers: list[int]) -> None:
        new = dict(zip(slots.tolist(), numbers, strict=True))
        self.in_flight |= new
        self.forward_stream.submit(functools.partial(self._forward_writes, new))

    def _forward_writes(self, new: dict[int, int]) -> None:
        for buffer in self.buffers:
            buffer[list(new)] = list(new.values())
        for slot in new:
            del self.in_flight[slot]

    def _read_slots(self, slots: np.ndarray) -> list[int]:
        """What is there once the forward stream has run; loads are left out."""
        first, *others = (
            [int(self.in_flight.get(slot, buffer[slot])) for slot in slots.tolist()] for buffer in self.buffers
        )
        assert all(values == first for values in others), "layers disagree"
        return first

    # ---- scheduling ----

    def _begin_turn(self) -> None:
        super()._begin_turn()
        self.cache.check_hicache_events()
        self.check()

    def _boundary(self, req: Req, ids: list[int]) -> tuple[int, int]:
        """As for one tier, but a part on the host is loaded only if it is worth it."""
        path = self.prefixes.path(ids[:-1])
        matched = next((i for i, prefix in enumerate(path) if prefix not in self.truth), len(path))
        device = next((i for i, prefix in enumerate(path[:matched]) if not self.truth[prefix].on_device), matched)
        if matched - device < LEAST_LOAD:
            matched = device
        boundaries = (b for b in range(matched + 1) if b <= device or b - device >= LEAST_LOAD)
        return matched, self._usable(req, path[:matched], boundaries)

    def _admit(self, req: Req, budget: int, reserved: int) -> bool:
        self.match(req)
        anchor = req.last_node
        lock = self.cache.inc_lock_ref(anchor)
        n = min(len(req.full_untruncated_fill_ids) - len(req.prefix_indices) - req.host_hit_length, budget)
        fits = reserved + n + req.host_hit_length <= self.free_kv
        if fits:
            self._load_back(req)
            n = min(len(req.full_untruncated_fill_ids) - len(req.prefix_indices), budget)
            self.cache.inc_lock_ref(req.last_node)
            req.skip_lock_node_ids = {}
            req.set_extend_range(len(req.prefix_indices), len(req.prefix_indices) + n)
        self.cache.dec_lock_ref(anchor, lock.to_dec_params())
        return fits

    def _load_back(self, req: Req) -> None:
        if not req.needs_host_load_back():
            return
        wanted = len(req.prefix_indices) + req.host_hit_length
        params = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        indices, req.last_node = self.cache.init_load_back(params)
        req.prefix_indices = torch.cat([req.prefix_indices, indices])
        req.cache_protected_len = len(req.prefix_indices)
        if not self.loads:
            return
        assert len(req.prefix_indices) == wanted, "there was room, but nothing was loaded"
        for prefix in self.path(req, wanted):
            self.truth[prefix].on_device = True
        self._check_tree(evicts_kv=True)

    def load_without_admission(self, req: Req) -> None:
        """A waiting request whose KV is loaded, but which then does not fit into the batch."""
        self.match(req)
        anchor = req.last_node
        lock = self.cache.inc_lock_ref(anchor)
        if len(req.full_untruncated_fill_ids) <= self.free_kv + len(req.prefix_indices):
            self._load_back(req)
        self.cache.dec_lock_ref(anchor, lock.to_dec_params())
        self.check()

    def _extend(self, reqs: list[Req]):
        self.consumer = self.cache.ready_to_load_host_cache()
        if self.early_loads:
            self.controller.load_stream.run()
        return super()._extend(reqs)

    def _forward(self, step, prefills: list[Req], decodes: list[Req]) -> None:
        self.forward_stream.run()  # passes run one after the other
        counter = self.pool.layer_transfer_counter
        counter.set_consumer(self.consumer if prefills else -1)
        with device_module.stream(current_stream()):
            for layer in FULL_LAYERS:
                self.pool.get_kv_buffer(layer)  # waits for the layer
        super()._forward(step, prefills, decodes)

    def _process(self, batch) -> None:
        if self.last is None or self.last is batch:
            self.forward_stream.run()
        super()._process(batch)

    def _expect_inserted(self, req: Req, n: int) -> None:
        for prefix in self.path(req, n):
            entry = self.truth.get(prefix)
            if entry is not None and not entry.on_device:
                # The request has computed its KV again.
                entry.on_device = True
                entry.generation = max(entry.generation, self.accounts[req.rid].generation)
        super()._expect_inserted(req, n)

    def flush(self) -> None:
        super().flush()
        self.loading.clear()
        assert self.controller.mem_pool_host.available_size() == self.controller.mem_pool_host.size

    # ---- checks ----

    def _check_node_kv(self, node, path: list[int]) -> None:
        full = node.component_data[ComponentType.FULL]
        if full.value is not None:
            here = [i for i, slot in enumerate(full.value.tolist()) if slot not in self.loading]
            assert self._read_kv(full.value[here].numpy()) == [path[i] for i in here], "a KV slot was overwritten"
        if full.host_value is not None and node.write_through_pending_id is None:
            host = self.controller.mem_pool_host.anchor_entry.host_pool
            expected = torch.tensor(path, dtype=host.k_buffer.dtype).view(-1, 1)
            for buffer in (host.k_buffer, host.v_buffer):  # [slots, layers, 1, 1]
                found = buffer[full.host_value].flatten(1)
                assert (found % BEHIND == expected).all(), "a KV slot of the host is wrong"

    def _check_kv(self, reqs: list[Req]) -> None:
        super()._check_kv(reqs)
        nodes = self.cache.tree_core._node_arena.values()
        values = [node.component_data[ComponentType.FULL].host_value for node in nodes]
        used = torch.cat([torch.empty(0, dtype=torch.int64), *(value for value in values if value is not None)])
        assert len(used.unique()) == len(used)
        group = self.controller.mem_pool_host
        assert group.available_size() + len(used) == group.size


def _record_loads(scheduler: TieredScheduler) -> None:
    """Note which slots are promised KV from the host, and take the note back when the copy runs."""
    controller, load = scheduler.controller, scheduler.controller.load

    def noted_load(*args, **kwargs):
        slots = load(*args, **kwargs)
        scheduler.loading.update(slots.tolist() if slots is not None else ())
        return slots

    controller.load = noted_load
    scheduler.pool.full_kv_pool.loaded = scheduler.loading.difference_update


def _submitted(copy):
    """A copy that runs when the stream on which it was called gets that far."""
    return lambda *args: current_stream().submit(functools.partial(copy, *args))


def _load_layer(pool, device_pool, host_indices, device_indices, layer: int, io_backend: str) -> None:
    host_pool.load_to_device_per_layer(pool, device_pool, host_indices, device_indices, layer, io_backend)
    if layer == device_pool.layer_num - 1:
        device_pool.loaded(device_indices.tolist())


def _use_simulated_device() -> None:
    for module in (cache_controller, hybrid_cache_controller):
        module.device_module = device_module
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _submitted(_load_layer)
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _submitted(host_pool.backup_from_device_all_layer)
    common._cuda_host_register = host_pool.register_nothing
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _kv_pool(request_pool) -> HybridLinearKVPool:
    return HybridLinearKVPool(
        size=KV_SLOTS,
        dtype=torch.float32,
        page_size=1,
        head_num=1,
        head_dim=1,
        full_attention_layer_ids=list(FULL_LAYERS),
        device="cpu",
        mamba_pool=request_pool.mamba_pool,
    )
