"""One line that says how far a run is: rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time


class Progress:
    def __init__(self, total: int, done: int, what: str, every: float = 30):
        self.total, self.done, self.failed = total, done, 0
        self._what, self._began, self._at_start = what, time.monotonic(), done
        self._terminal, self._every, self._said = sys.stdout.isatty(), every, 0.0
        self._lock = threading.Lock()

    def resume(self) -> None:
        """Times count from now on: a server has started."""
        self._began, self._at_start = time.monotonic(), self.done + self.failed

    def step(self, name: str, failed: bool = False) -> None:
        with self._lock:
            self.done, self.failed = self.done + (not failed), self.failed + failed
            now = time.monotonic()
            if self._terminal or self.done + self.failed == self.total or now - self._said > self._every:
                self._said = now
                end = "" if self._terminal and self.done + self.failed < self.total else "\n"
                print(f"{chr(13) if self._terminal else ''}{self.line(name):<100}", end=end, flush=True)

    def line(self, name: str) -> str:
        fresh = self.done + self.failed - self._at_start
        seconds = (time.monotonic() - self._began) / max(1, fresh)
        left = seconds * (self.total - self.done - self.failed)
        errors = f", {self.failed} errors" if self.failed else ""
        return (
            f"[{self._what}] {self.done}/{self.total}{errors}, {seconds:.1f} s each, {left / 60:.0f} min left: {name}"
        )
