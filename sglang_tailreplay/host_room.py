"""What the host's free memory is given to: HiCache's KV first, which takes what its own flags say, then saved states,
then rows. Nothing is allocated here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_tailreplay.anchor_store import anchor_bytes, choose_anchors
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.cuda_streams.row_codec import make_codec
from sglang_tailreplay.decay_store import decay_bytes
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.row_store import RowShape, choose_capacity, free_host_bytes

if TYPE_CHECKING:
    from sglang_tailreplay.adapters import HybridModel


class HostRoom(NamedTuple):
    shape: RowShape
    rows: int  # in the row store
    kv_slots: int  # on the device and, with HiCache, on the host
    anchors: int  # places in the anchor store; 0: there is none


def divide(config: TailReplayConfig, server_args: Any, model: HybridModel, model_runner: Any) -> HostRoom:
    """Sizes of the stores of a model whose KV and state pools exist. TailReplayError where one of them has no room."""
    shape = _row_shape(config, model, model_runner)
    kv_slots, free_bytes = _kv_slots(server_args, model_runner.token_to_kv_pool_allocator, free_host_bytes())
    anchors, free_bytes = _anchors(config, model_runner, kv_slots, free_bytes)
    return HostRoom(shape, choose_capacity(shape.bytes, kv_slots, free_bytes, config.host_gb), kv_slots, anchors)


def value_heads(model_runner: Any) -> tuple[int, int]:
    """Value heads of a GDN layer, and the number of these layers."""
    layers, _, heads, *_ = model_runner.req_to_token_pool.mamba_pool.mamba_cache.temporal.shape
    return heads, layers


def _row_shape(config: TailReplayConfig, model: HybridModel, model_runner: Any) -> RowShape:
    dtype: torch.dtype = model_runner.dtype
    try:
        codec = make_codec(config.row_dtype, model.hidden_size, dtype)
    except ValueError as error:
        raise TailReplayError(f"--tail-replay-row-dtype: {error}; leave it out") from None
    beside = decay_bytes(*value_heads(model_runner)) if config.max_residual is not None else 0
    return RowShape(model.row_groups, model.hidden_size, dtype, codec, beside)


def _kv_slots(server_args: Any, allocator: Any, free_bytes: int) -> tuple[int, int]:
    """KV slots on the device and, with HiCache, on the host; bytes that HiCache leaves free."""
    if not server_args.enable_hierarchical_cache:
        return allocator.size, free_bytes
    from sglang_tailreplay import host_tier

    host = host_tier.planned_pool(server_args, allocator.get_kvcache(), free_bytes)
    return allocator.size + host.tokens, free_bytes - host.bytes


def _anchors(config: TailReplayConfig, model_runner: Any, kv_slots: int, free_bytes: int) -> tuple[int, int]:
    """Places in the anchor store, and the bytes that it leaves free."""
    if config.anchor_interval == 0:
        return 0, free_bytes
    cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache
    each = anchor_bytes((*cache.conv, cache.temporal), config.anchor_dtype)
    count = choose_anchors(each, kv_slots, config.anchor_interval, free_bytes, config.anchor_gb)
    return count, free_bytes - count * each
