"""One line in SGLang's log for every minute in which requests came: what hits found, for operators without /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_tailreplay.scheduling import Admission

SECONDS = 60.0


class MinuteLog:
    """Adds up what is admitted. `say` gets the line a minute after the first request of it, which is looked at whenever
    a request comes or the server is idle, so that nothing runs for it alone."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._clear()

    def _clear(self) -> None:
        self._begin: float | None = None
        self._requests = self._hits = self._shrunk = 0
        self._prompt = self._matched = self._replayed = 0

    def admitted(self, admission: Admission) -> None:
        if self._begin is None:
            self._begin = self._clock()
        self._requests += 1
        self._hits += admission.matched > 0
        self._shrunk += admission.shrunk_from is not None
        self._prompt += admission.prompt
        self._matched += admission.matched
        self._replayed += admission.replayed

    def look(self, rows_used: int, rows_capacity: int) -> None:
        """Say the line if it is time. Cheap otherwise: it is called over and over."""
        if self._begin is None or (seconds := self._clock() - self._begin) < SECONDS:
            return
        usage = f", row usage: {rows_used / rows_capacity:.2f}" if rows_capacity else ""
        self._say(
            f"tail_replay: in {seconds:.0f} s, #req: {self._requests}, #hit: {self._hits}, "
            f"#shrunk-hit: {self._shrunk}, #prompt-token: {self._prompt}, #cached-token: {self._matched}, "
            f"#replayed-token: {self._replayed}{usage}"
        )
        self._clear()
