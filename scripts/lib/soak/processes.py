"""The server's processes: their memory, their death, what they leave behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from soak.judge import Failure, Sample

SHARED_MEMORY = Path("/dev/shm")


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty if it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def sample(pid: int) -> Sample:
    """Memory that processes share counts once for each of them: this is for growth, not for sizes."""
    count = rss = 0
    for process in tree(pid):
        try:
            rss += process.memory_info().rss
            count += 1
        except psutil.NoSuchProcess:
            pass
    return Sample(time.monotonic(), count, rss)


def scheduler_of(pid: int) -> psutil.Process:
    """SGLang's scheduler below the server's process; RuntimeError if there is none."""
    for process in tree(pid):
        try:
            if "sglang::scheduler" in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    raise RuntimeError(f"no process below {pid} is called sglang::scheduler")


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there after so many seconds."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def shared_memory() -> set[str]:
    """Names in /dev/shm that belong to this user."""
    if not SHARED_MEMORY.is_dir():
        return set()
    names = set()
    for path in SHARED_MEMORY.iterdir():
        try:
            if path.stat().st_uid == os.getuid():
                names.add(path.name)
        except FileNotFoundError:
            pass
    return names


def left_behind(port: int, before: set[str]) -> Iterator[Failure]:
    """What a killed server still holds. `before`: shared_memory() from before it started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: closed connections may linger
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Failure("port-held", f"port {port} is not free after the kill: {error}")
    left = shared_memory() - before
    if left:
        yield Failure("shared-memory-left", f"in {SHARED_MEMORY} after the kill: {', '.join(sorted(left)[:5])}")
