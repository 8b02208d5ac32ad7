"""SGLang plugin of bench_ttft: lets a client push the whole prefix cache out of the GPU, onto the host tier.

    engine.collective_rpc("evict_device_cache")

SGLang evicts when it runs out of slots only. Filling them with other prompts before every measured request would cost a
prefill of the whole pool each time.
"""

from __future__ import annotations

import time
from typing import Any

BACKUP_SECONDS = 20


def register() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.evict_device_cache = evict_device_cache


def evict_device_cache(scheduler: Any) -> None:
    """In the scheduler's process, between two of its steps. Waits until what is cached has reached the host, then
    evicts all of it from the GPU. RuntimeError where there is no host tier, or where requests still hold KV."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = scheduler.tree_cache
    if getattr(tree, "cache_controller", None) is None:
        raise RuntimeError("evict_device_cache needs --enable-hierarchical-cache: the KV would be lost")
    deadline = time.monotonic() + BACKUP_SECONDS
    while tree.ongoing_write_through or tree.ongoing_load_back:
        tree.check_hicache_events()
        if time.monotonic() > deadline:
            raise RuntimeError(f"transfers between GPU and host did not end within {BACKUP_SECONDS} s")
        time.sleep(0.0005)
    tree.evict(EvictParams(num_tokens=tree.full_evictable_size()))
    left = tree.full_evictable_size() + tree.full_protected_size()
    if left:
        raise RuntimeError(f"{left} cached tokens stay on the GPU")
