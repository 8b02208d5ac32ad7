"""Where a result comes from: machine, versions, commit, command."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from arguments import CHECKOUT

DISTRIBUTIONS = ("torch", "triton", "sglang", "flashinfer-python", "flash-linear-attention")


def machine() -> dict[str, Any]:
    return {
        "gpus": gpus(),
        "cuda": _torch_cuda(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in DISTRIBUTIONS},
    }


def gpus() -> list[str]:
    """Name, driver and memory of each."""
    told = first_output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return told.splitlines() if told else []


def need_gpu(machine: dict[str, Any]) -> None:
    """SystemExit on a machine without one, before an engine fails for it."""
    if not machine["gpus"]:
        raise SystemExit("error: nvidia-smi finds no GPU here; --dry-run says what would run on one")


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(options: argparse.Namespace) -> dict[str, Any]:
    """`dirty` is None where git cannot tell: not there, or in a copy of the checkout that has another history."""
    head, changed = first_output("git", "rev-parse", "HEAD"), first_output("git", "status", "--porcelain")
    copied = options.commit is not None and not (head or "").startswith(options.commit)
    dirty = None if changed is None or copied else bool(changed)
    return {"commit": options.commit or head, "dirty": dirty}


def origin(script: str, options: argparse.Namespace) -> dict[str, Any]:
    """Head of a JSON document. Options: commit, model_shape, model_path."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([script, *sys.argv[1:]]),
        **commit_of(options),
        "shape": options.model_shape or options.model_path,
        "machine": machine(),
    }
