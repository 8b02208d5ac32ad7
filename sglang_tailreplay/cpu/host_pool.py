"""HiCache's host pool on a machine without CUDA: plain memory, and copies by indexing instead of by kernels.

The functions replace methods of SGLang's MHATokenToKVPoolHost. There are no streams on a CPU, so a copy is done when
the call returns.
"""

from typing import Any

import torch

RESERVE_BYTES = 1 << 30  # host memory that a host pool leaves free; SGLang's 10 GiB are for servers


def load_to_device_per_layer(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
) -> None:
    """KV of one layer, host to device; both indices [N]."""
    place = _place(pool, layer_id, host_indices)
    device_pool.k_buffer[layer_id][device_indices] = pool.k_buffer[place]
    device_pool.v_buffer[layer_id][device_indices] = pool.v_buffer[place]


def backup_from_device_all_layer(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """KV of all layers, device to host; both indices [N]."""
    for layer in range(device_pool.layer_num):
        place = _place(pool, layer, host_indices)
        pool.k_buffer[place] = device_pool.k_buffer[layer][device_indices]
        pool.v_buffer[place] = device_pool.v_buffer[layer][device_indices]


def _place(pool: Any, layer: int, indices: torch.Tensor) -> tuple:
    """The index of one layer's KV [N, H, D] in the buffers of the host pool."""
    if pool.layout == "layer_first":
        return layer, indices
    if pool.layout == "page_first":
        return indices, layer
    if pool.layout == "page_first_direct":
        return indices // pool.page_size, layer, indices % pool.page_size
    raise NotImplementedError(f"--hicache-mem-layout {pool.layout} needs a GPU; choose layer_first or page_first")


def register_nothing(buffer: torch.Tensor) -> None:
    """Pinning, which only a GPU needs."""
