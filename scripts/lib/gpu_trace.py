"""Chrome traces of torch's profiler: reading them, and keeping only what happened on the GPU. Standard library only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
KEPT_ARGUMENTS = ("stream", "correlation", "bytes")
MAX_BYTES = 6_000_000


def load(path: Path) -> dict[str, Any]:
    """A .json or .json.gz file."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        data = json.load(file)
    return {"traceEvents": data} if isinstance(data, list) else data


def gpu_events(trace: Mapping[str, Any]) -> dict[str, Any]:
    """What ran on the GPU, the runtime calls that launched it, and the names of processes and threads. ValueError where
    nothing ran on a GPU."""
    events = trace["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    if not on_gpu:
        raise ValueError("the trace has no GPU events: it was recorded without a GPU, or without the activity GPU")
    launched = {event["args"]["correlation"] for event in on_gpu if "correlation" in event.get("args", {})}
    launches = [
        event
        for event in events
        if event.get("cat") in LAUNCHES and event.get("args", {}).get("correlation") in launched
    ]
    processes = {event.get("pid") for event in (*on_gpu, *launches)}
    names = [event for event in events if event.get("ph") == "M" and event.get("pid") in processes]
    return {"traceEvents": [*names, *map(_slim, launches), *map(_slim, on_gpu)]}


def _slim(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args", {})
    return {**event, "args": {key: args[key] for key in KEPT_ARGUMENTS if key in args}}


def save(trace: Mapping[str, Any], path: Path) -> int:
    """Writes a .json.gz of at most MAX_BYTES and returns its size. ValueError, and no file, if it is larger."""
    data = gzip.compress(json.dumps(trace, separators=(",", ":")).encode())
    if len(data) > MAX_BYTES:
        raise ValueError(f"the filtered trace has {len(data)} bytes, more than {MAX_BYTES}")
    path.write_bytes(data)
    return len(data)
