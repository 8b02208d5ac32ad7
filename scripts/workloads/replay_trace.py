"""A public block-hash trace as requests: every block is random tokens that depend on its id, so that prompts share what
they share in the trace. Arrivals as in the trace, or as fast as `concurrency` allows."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import block_trace
from block_trace import Request
from client import Client
from load import Load

SAMPLE = Path(__file__).resolve().parents[1] / "traces" / "mooncake-conversation-sample.jsonl"
LONGEST = 32000  # tokens of a prompt; longer ones are cut


def prompt(request: Request, load: Load) -> list[int]:
    ids: list[int] = []
    for block in request.blocks:
        ids += load.text(f"block/{block.key}", block.size)
    return ids[: load.length(LONGEST)]


def run(client: Client, load: Load, path: Path = SAMPLE, requests: int | None = None, timed: bool = False) -> None:
    """The first `requests` of the trace (default: ten for every round). With `timed` at the trace's times."""
    chosen = block_trace.load([path])[: requests or 10 * load.rounds]
    begin = time.monotonic()

    def send(request: Request) -> None:
        if timed:
            time.sleep(max(0.0, begin + request.seconds - time.monotonic()))
        client.generate(prompt(request, load))

    client.together([partial(send, request) for request in chosen], len(chosen) if timed else load.concurrency)
