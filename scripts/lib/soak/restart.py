"""kill -9 of the scheduler under load, and the start after it: clients hear of it, nothing is left behind, and the next
server answers as the first one did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from soak import processes
from soak.client import Client
from soak.judge import Failure, Outcome, difference
from soak.plan import fresh_tokens
from soak.run import Settings

LOAD = 8  # requests in flight when the scheduler dies
GONE_SECONDS = 60  # within which a server without its scheduler has ended


async def kill_and_restart(
    client: Client, server: Any, start: Callable[[], Any], stop: Callable[[Any], None], settings: Settings
) -> list[Failure]:
    """What went wrong. `start` returns the next server when it is ready, and leaves it running; `stop` ends the rest of
    the first one. A server: base_url, process.pid."""
    prompt = fresh_tokens(settings.seed, -200, settings.limits.max_prompt, settings.limits.vocabulary)
    right = await client.cold(prompt, 8, f"soak-kill-{time.time_ns()}")
    load = [asyncio.create_task(client.cold(prompt, settings.limits.max_new, f"load-{i}")) for i in range(LOAD)]
    await asyncio.sleep(0.3)  # so that some of them run
    family = processes.tree(server.process.pid)
    mapped = processes.shared_memory(family)
    processes.scheduler_of(server.process.pid).kill()
    failures = [*_judge_load(await asyncio.gather(*load), client.deadline)]
    for left in await asyncio.to_thread(processes.wait_gone, family, GONE_SECONDS):
        text = f"process {left.pid} lives {GONE_SECONDS} s after its scheduler was killed"
        failures.append(Failure("processes-left", text))
    stop(server)
    failures += processes.left_behind(urlsplit(server.base_url).port, mapped)
    following = await asyncio.to_thread(start)
    fresh = Client(following.base_url, client.deadline, connections=8)
    try:
        first = await fresh.exact(prompt, 8)
    finally:
        await fresh.close()
    return [*failures, *_judge_first(first, right, settings.max_logprob_difference)]


def _judge_load(heard: list[Outcome], deadline: float) -> Iterator[Failure]:
    if all(outcome.status == 200 for outcome in heard):
        yield Failure("kill", "no request in flight saw an error: the load was over before the kill")
    if any(outcome.message.startswith("no end after") for outcome in heard):
        yield Failure("kill-hangs", f"a client waited {deadline:.0f} s for a dead scheduler")


def _judge_first(first: Outcome, right: Outcome, bound: float | None) -> Iterator[Failure]:
    apart = difference(first, right)
    same = first.tokens == right.tokens or apart.tie if bound is None else apart.logprob <= bound
    if first.status != 200 or not same:
        yield Failure("restart", f"first request after the restart: {first}, before the kill {right}")
