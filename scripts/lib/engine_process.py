"""Run one engine in a child process, with a time limit and a log of its own. Its module says what it is asked."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

LIB = Path(__file__).resolve().parent


class Limits(NamedTuple):
    """Seconds. A start takes 40 to 150 of them on one and the same kind of machine, so it has a limit of its own."""

    start: float  # until the engine is ready
    work: float  # from then on
    total: float = math.inf  # for both


def run_engine(plan: Any, runner: str, out: Path, limits: Limits) -> dict[str, Any]:
    """Run `plan` by the module `runner` of this folder. Returns the outcome that it wrote, whatever ended it;
    `error` is None where it came to its end."""
    log = out.with_suffix(f".{plan.name}.log")
    print(f"[{plan.name}] starting, at most {limits.start:.0f} s, log in {log}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(json.dumps(plan.to_json()))
        ended = _run_child(plan, runner, Path(folder), log, limits)
        result = Path(folder) / "out.json"
        outcome = json.loads(result.read_text()) if result.exists() else {"sections": {}, "error": "no result"}
    if outcome["error"]:
        outcome |= {"error": f"{outcome['error']}, {ended}", "log_tail": tail(log)}
        print(f"[{plan.name}] FAILED: {outcome['error']}; its log ends with\n{outcome['log_tail']}", flush=True)
    wall = round(time.monotonic() - start, 1)
    # Paths of this machine mean nothing to a reader.
    args = {**plan.args, "model_path": str(Path(plan.args["model_path"]).name)}
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    return {"args": args, "env": env, "wall_seconds": wall, "log": log.name, **outcome}


def _run_child(plan: Any, runner: str, folder: Path, log: Path, limits: Limits) -> str:
    """Run the module in its own process group and leave nothing of it behind. Returns how it ended."""
    progress = os.dup(sys.stdout.fileno())
    command = [sys.executable, LIB / f"{runner}.py", folder / "plan.json", folder / "out.json"]
    env = {key: value for key, value in os.environ.items() if key != "SGLANG_TAILREPLAY"} | plan.env
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [*map(str, command), str(progress)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(progress,),
        )
    try:
        return wait(child, folder / "out.json", limits)
    finally:
        os.close(progress)
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def wait(child: subprocess.Popen, outcome: Path, limits: Limits) -> str:
    """Wait for the child's end; TimeoutExpired never leaves. Returns how it ended, or that it has to be killed."""
    begin, ready, what = time.monotonic(), None, "start"
    while True:
        try:
            return f"exit code {child.wait(0.2)}"
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if ready is None and _is_ready(outcome):
            ready, what = now, "work"
        since, limit = (begin, limits.start) if ready is None else (ready, limits.work)
        if now - since >= limit:
            return f"killed at the limit of {limit:.0f} s for its {what}"
        if now - begin >= limits.total:
            return f"killed at the limit of {limits.total:.0f} s"


def _is_ready(outcome: Path) -> bool:
    """Whether the runner has written that its engine is up."""
    try:
        return json.loads(outcome.read_text())["start_seconds"] is not None
    except (OSError, ValueError):  # not there yet, or half written
        return False


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
