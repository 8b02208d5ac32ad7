"""A server of its own for each anchor interval, in a process group of its own, ended with everything it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_tailreplay.config import CONV_WIDTH, ENVIRONMENT, TailReplayConfig
from sglang_tailreplay.errors import TailReplayError

MODULE = "sglang_tailreplay.launch_server"
HOST = "127.0.0.1"


def settings_for(config: TailReplayConfig, anchor_interval: int) -> TailReplayConfig:
    """Tails of any length, asked for by each request and never grown; what else the operator set stays."""
    tails = {"mode": "replay", "ratio": 1.0, "min_tokens": CONV_WIDTH, "max_tokens": None, "max_residual": None}
    anchor_gb = config.anchor_gb if anchor_interval else None
    return dataclasses.replace(config, **tails, anchor_interval=anchor_interval, anchor_gb=anchor_gb)


@contextlib.contextmanager
def server(model: str, config: TailReplayConfig, flags: Sequence[str], log: Path, seconds: float) -> Iterator[str]:
    """Yields its address when it is ready. TailReplayError with the end of its log if it does not get there."""
    port = _free_port()
    command = [sys.executable, "-m", MODULE, "--model-path", model, "--skip-tokenizer-init", *flags]
    command += ["--host", HOST, "--port", str(port)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=_environment(config, os.environ), stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://{HOST}:{port}"
        _wait(process, url, log, seconds)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(config: TailReplayConfig, environ: Mapping[str, str]) -> dict[str, str]:
    # Without this, SGLang's health check generates a token each time.
    quiet = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "PYTHONUNBUFFERED": "1"}
    return {**environ, **quiet, ENVIRONMENT: config.to_json()}


def _wait(process: subprocess.Popen, url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _is_ready(url):
        ended, late = process.poll() is not None, time.monotonic() > deadline
        if ended or late:
            what = f"ended with {process.returncode}" if ended else f"was not ready after {seconds:.0f} s"
            raise TailReplayError(f"the server {what}; its log, {log}, ends with\n{_tail(log)}")
        time.sleep(0.5)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except OSError:
        return False


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
