"""KV on the host: SGLang's HiCache (L2) for the full-attention layers, and for nothing else.

SGLang's own stack for hybrid models also keeps recurrent states on the host, and its GDN layers wait for them. Here no
state is stored, so there is no host pool for states, and neither a GDN layer nor a replay ever waits for KV: a
full-attention layer waits for its own KV when it comes to it (HybridLinearKVPool's layer counter).

Rows take no part. They belong to tree nodes and lie on the host already; see radix/component.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_tailreplay.errors import TailReplayError

if TYPE_CHECKING:
    from sglang_tailreplay.radix.tree import TailReplayCache

GIB = 1 << 30


class KvController(HybridCacheController):
    """SGLang's controller, whose copies also wait for the forward pass that is running.

    With overlap scheduling the tree takes a request's last token while the pass that writes its KV still runs, and a
    pass may still write KV slots that were freed and given to a load. SGLang 0.5.17 orders its copies after the
    scheduler's stream only, which does not wait for such a pass.
    """

    forward_stream: Any

    def start_writing(self) -> None:
        if self.write_queue:
            self.write_stream.wait_stream(self.forward_stream)
        super().start_writing()

    def start_loading(self) -> int:
        if self.load_queue:
            self.load_stream.wait_stream(self.forward_stream)
        return super().start_loading()


class KvOnlyStack(assembler.StackStrategy):
    """What attach_hybrid_pool_to_unified_cache builds for a TailReplayCache."""

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return isinstance(kvcache, HybridLinearKVPool) and components == {ComponentType.FULL, ComponentType.MAMBA}

    def build(
        self, *, cache: TailReplayCache, kvcache: HybridLinearKVPool, params: Any, server_args: Any, **settings: Any
    ) -> assembler.StackBuildResult:
        # The counter counts all layers of the model, because full-attention layers wait by their number in the model.
        layers = len(kvcache.full_attention_layer_id_mapping) + len(params.req_to_token_pool.mamba_map)
        kv_pool = kvcache.full_kv_pool
        host_pool = assembler.build_kv_host_pool(
            kv_pool=kv_pool, page_size=params.page_size, server_args=server_args, use_mla=kvcache.use_mla
        )
        entry = assembler.build_pool_entry(
            name=PoolName.KV,
            host_pool=host_pool,
            device_pool=kv_pool,
            layer_mapping=dict(kvcache.full_attention_layer_id_mapping),
            transfer_layer_num=layers,
            is_anchor=True,
        )
        group = HostPoolGroup([entry])
        controller = KvController(
            params.token_to_kv_pool_allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=settings["load_cache_event"],
            write_policy=server_args.hicache_write_policy,
            io_backend=server_args.hicache_io_backend,
            transfer_layer_num=layers,
        )
        controller.forward_stream = cache.forward_stream
        return assembler.StackBuildResult(
            host_pool_group=group,
            cache_controller=controller,
            component_host_pools={ComponentType.FULL: host_pool},
            register_req_to_token_counter=False,
            transfer_layer_num=layers,
            pools_desc="KV of full-attention layers",
        )


def attach(cache: TailReplayCache, ctx: Any, forward_stream: Any) -> None:
    """Give the cache its host tier; forward_stream is the stream on which SGLang runs forward passes."""
    if not any(isinstance(strategy, KvOnlyStack) for strategy in assembler._STRATEGIES):
        assembler.register_stack_strategy(KvOnlyStack())
    cache.forward_stream = forward_stream
    cache.init_hicache(ctx.server_args, ctx.params)
    ctx.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)


class HostPool(NamedTuple):
    """What SGLang's host pool will hold and take."""

    tokens: int
    bytes: int


def planned_pool(server_args: Any, kvcache: HybridLinearKVPool, free_bytes: int) -> HostPool:
    """The pool that HiCache will allocate; TailReplayError if it does not fit into free_bytes of host memory."""
    pool = kvcache.full_kv_pool
    token_bytes = 2 * pool.head_num * pool.head_dim * pool.layer_num * pool.store_dtype.itemsize
    return pool_of(server_args, token_bytes, pool.size, free_bytes)


def pool_of(server_args: Any, token_bytes: int, kv_slots: int, free_bytes: int) -> HostPool:
    """The same from the bytes of a token's KV and the number of KV slots on the device."""
    if server_args.hicache_size > 0:
        setting, tokens = (
            f"--hicache-size {server_args.hicache_size}",
            int(server_args.hicache_size * 1e9) // token_bytes,
        )
    else:
        setting = f"--hicache-ratio {server_args.hicache_ratio:g}"
        tokens = int(kv_slots * server_args.hicache_ratio)
    if tokens * token_bytes >= free_bytes:
        raise TailReplayError(
            f"tail_replay: {setting} takes {tokens * token_bytes / GIB:.1f} GiB of host memory for KV, but "
            f"{free_bytes / GIB:.1f} GiB are free and the rows need room as well. Give a smaller --hicache-size."
        )
    return HostPool(tokens, tokens * token_bytes)
