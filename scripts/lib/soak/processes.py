"""The server's processes: their memory, their death, what they leave behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from soak.judge import Failure, Sample

SHARED_MEMORY = Path("/dev/shm")
# SGLang 0.5.17 itself leaves its load counters (16 KB) and a semaphore behind when it is killed.
MOST_LEFT_BYTES = 1 << 20


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
    """Those that still run after so many seconds. A zombie does not: only its parent has not asked for it yet."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """What these processes have mapped of /dev/shm."""
    found = set()
    for process in processes:
        try:
            found |= {Path(area.path) for area in process.memory_maps() if Path(area.path).parent == SHARED_MEMORY}
        except psutil.Error:
            pass
    return found


def left_behind(port: int, mapped: set[Path]) -> Iterator[Failure]:
    """What a killed server still holds. `mapped`: its shared_memory() from when it ran."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does: closed connections may linger
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Failure("port-held", f"port {port} is not free after the kill: {error}")
    left = {path.name: path.stat().st_size for path in mapped if path.exists()}
    if sum(left.values()) > MOST_LEFT_BYTES:
        yield Failure("shared-memory-left", f"in {SHARED_MEMORY} after the kill, in bytes: {left}")
