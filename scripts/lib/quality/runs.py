"""Runs the jobs of one server: starts it where no address is given, asks many at a time, keeps every answer."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from arguments import CHECKOUT

from quality.answers import AnswerFile
from quality.ask import Asker, Cached, ServerFailed, WrongBoundary
from quality.plan import Job
from quality.progress import Progress

sys.path.append(str(CHECKOUT / "tests" / "serving"))
PATIENCE = 8  # errors in a row: more would only take time


@dataclass
class Outcome:
    """Of the jobs of one server."""

    errors: list[str] = field(default_factory=list)
    stopped: str | None = None  # why the run ended before its jobs did


class NotStarted(RuntimeError):
    """A server that this run needs; the message ends with its log's last lines."""


@contextlib.contextmanager
def server(model: str, flags: Sequence[str], env: Mapping[str, str], log: Path, seconds: float) -> Iterator[str]:
    """A server of its own in a process group of its own; yields its address. NotStarted if it does not get ready."""
    import server as serving

    print(f"starting {' '.join(flags)}; log in {log}", flush=True)
    started = serving.start(model, *flags, env=dict(env), log_path=log)
    try:
        try:
            serving.wait_ready(started, seconds)
        except serving.ServerDied as error:
            raise NotStarted(f"{log.name}: {error}") from error
        yield started.base_url
    finally:
        serving.stop(started)


def run(
    jobs: Sequence[Job],
    asker: Asker,
    kept: AnswerFile,
    concurrency: int,
    progress: Progress,
    expired: Callable[[], bool] = lambda: False,
) -> Outcome:
    """The jobs of one prompt one after the other, of many prompts at a time; none is begun once the run
    has `expired`. An answer that was not served from its boundary is asked for `twice`."""
    outcome, in_a_row, lock, over = Outcome(), [0], threading.Lock(), threading.Event()
    progress.resume()

    def told(job: Job, error: str | None) -> None:
        with lock:
            in_a_row[0] = in_a_row[0] + 1 if error else 0
            if error:
                outcome.errors.append(f"{job.prompt.name} {job.variant} cut={job.cut}: {error}")
            if in_a_row[0] >= PATIENCE and not over.is_set():
                outcome.stopped = f"{PATIENCE} errors in a row, the last one: {outcome.errors[-1]}"
                over.set()
        progress.step(f"{job.prompt.name} {job.variant}", failed=error is not None)

    def of_prompt(same: list[Job]) -> None:
        cached = Cached(asker, same[0].prompt)
        for job in same:
            if over.is_set() or expired():
                return
            told(job, twice(lambda job=job: kept.add(cached.answer(job.cut, job.variant))))

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            for _ in pool.map(of_prompt, by_prompt(jobs)):
                pass
        except BaseException:
            over.set()  # or the pool would ask all that is queued before it ends
            raise
    return outcome


def by_prompt(jobs: Sequence[Job]) -> list[list[Job]]:
    """In the order of the prompts' first jobs."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.prompt.name, []).append(job)
    return list(found.values())


def twice(ask: Callable[[], str | None]) -> str | None:
    """What `ask` says is wrong, or why it failed; None: nothing. A full cache may have dropped what it builds on: once
    more then, and if that is so again, it is an error."""
    for attempt in range(2):
        try:
            return ask()
        except WrongBoundary as error:
            if attempt:
                return str(error)
        except ServerFailed as error:
            return str(error)
    return None
