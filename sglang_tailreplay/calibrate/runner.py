"""Runs the measurement: a server for each anchor interval, each prompt cold and then as a hit of every cell."""

from __future__ import annotations

import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sglang_tailreplay.calibrate.judge import Sample
from sglang_tailreplay.calibrate.measure import Client, NotServed
from sglang_tailreplay.calibrate.plan import Cell
from sglang_tailreplay.calibrate.serving import server, settings_for
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.errors import TailReplayError

PATIENCE = 8  # failed requests in a row: more would only take time


@dataclass(frozen=True)
class Task:
    model_path: str
    config: TailReplayConfig
    flags: list[str]  # for the server
    prompts: Mapping[int, Sequence[list[int]]]  # by length; a boundary of at most that, and behind it the suffix
    suffix: int  # tokens
    cells: Mapping[int, Sequence[Cell]]  # by anchor interval
    vocab_size: int
    concurrency: int
    ready_seconds: float
    log_folder: Path


@dataclass
class Found:
    samples: dict[Cell, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)


class Asked(NamedTuple):
    samples: list[tuple[Cell, Sample]]
    error: str | None  # what went wrong


def run(task: Task) -> Found:
    """Everything that could be measured. TailReplayError where nothing could."""
    found = Found()
    for interval, cells in task.cells.items():
        try:
            _on_server(task, interval, cells, found)
        except TailReplayError as error:
            # What other servers say may have taken hours of a GPU; what is missing now is not recommended.
            print(f"error: {error}", file=sys.stderr, flush=True)
            found.errors.append(f"anchors every {interval}: {error}")
    if not found.samples:
        raise TailReplayError(f"nothing was measured: {found.errors[-1]}")
    return found


def _on_server(task: Task, interval: int, cells: Sequence[Cell], found: Found) -> None:
    anchors = f" with anchors every {interval} tokens" if interval else ""
    print(f"starting a server{anchors}", flush=True)
    log = task.log_folder / f"calibrate-anchors-{interval}.log"
    config = settings_for(task.config, interval)
    with server(task.model_path, config, task.flags, log, task.ready_seconds) as url:
        _measure(task, Client(url), cells, found)


def _measure(task: Task, client: Client, cells: Sequence[Cell], found: Found) -> None:
    _check_room(client, max(len(ids) for prompts in task.prompts.values() for ids in prompts))
    by_length: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_length[cell.length].append(cell)
    jobs = [(length, ids) for length in by_length for ids in task.prompts[length]]
    pool = ThreadPoolExecutor(task.concurrency)
    try:
        asked = pool.map(lambda job: _ask(client, job[1], by_length[job[0]], task), jobs)
        _collect(asked, len(jobs), found)
    finally:
        # Not waited for: where this ends early, the server ends next, and its answers with it.
        pool.shutdown(wait=False, cancel_futures=True)


def _collect(asked: Iterable[Asked], total: int, found: Found) -> None:
    begin, in_a_row = time.monotonic(), 0
    for number, (samples, error) in enumerate(asked, 1):
        for cell, sample in samples:
            found.samples[cell].append(sample)
        in_a_row = in_a_row + 1 if error else 0
        if error:
            found.errors.append(error)
        if in_a_row == PATIENCE:
            raise TailReplayError(f"{PATIENCE} prompts failed in a row, the last one: {error}")
        _progress(number, total, time.monotonic() - begin)


def _ask(client: Client, ids: list[int], cells: Sequence[Cell], task: Task) -> Asked:
    """One prompt. It counts in the cells that were served as they should be."""
    space, samples, boundary = uuid.uuid4().hex, [], len(ids) - task.suffix
    try:
        cold = client.cold(ids, boundary, space, task.vocab_size)
    except NotServed as error:
        return Asked([], f"cold, {boundary} tokens: {error}")
    problem = None
    for cell in cells:
        try:
            samples.append((cell, client.hit(cold, cell, space)))
        except NotServed as error:
            problem = f"{cell}: {error}"
    return Asked(samples, problem)


def _check_room(client: Client, longest: int) -> None:
    room = client.get("/server_info")["max_total_num_tokens"]
    if longest >= room:
        raise TailReplayError(
            f"--lengths: prompts of {longest} tokens do not fit the server's KV of {room}; measure shorter ones, or "
            "raise --max-total-tokens or --mem-fraction-static"
        )


def _progress(done: int, total: int, seconds: float) -> None:
    terminal = sys.stdout.isatty()
    if terminal or done == total or done % 10 == 0:
        left = seconds / done * (total - done)
        duration = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        text = f"{done} of {total} prompts, {seconds / done:.1f} s each, {duration} left"
        print(f"\r{text:<70}" if terminal and done < total else f"\r{text}" if terminal else text,
              end="" if terminal and done < total else "\n", flush=True)  # fmt: skip
