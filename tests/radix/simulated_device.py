"""Streams and events on a machine without any: work waits in its stream until somebody runs it or waits for it.

`device_module` stands in for torch.cuda or torch.cpu in SGLang's HiCache controllers. Work outside of stream() is done
at once, as by a device that is never late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace


class Stream:
    def __init__(self, *args, **kwargs):
        self._todo: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self._todo.append(work)

    def run(self, n: int | None = None) -> None:
        """The next n pieces of work, or all."""
        for _ in range(len(self._todo) if n is None else min(n, len(self._todo))):
            self._todo.popleft()()

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._todo.popleft()()

    def wait_event(self, event: Event) -> None:
        # What comes later in this stream runs after the event as it is recorded now.
        goal = event.recorded
        self.submit(lambda: event.run_until(goal))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Immediate(Stream):
    """The stream of the caller: work is done when it is submitted."""

    def submit(self, work: Callable[[], None]) -> None:
        work()


class Event:
    def __init__(self, **kwargs):
        self.recorded = self.reached = 0  # how often
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _current[-1]
        self.recorded += 1
        number = self.recorded
        self._stream.submit(lambda: setattr(self, "reached", max(self.reached, number)))

    def query(self) -> bool:
        return self.reached == self.recorded

    def run_until(self, goal: int) -> None:
        if self._stream is not None:
            self._stream.run_until(lambda: self.reached >= goal)

    def synchronize(self) -> None:
        self.run_until(self.recorded)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current[-1]).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


_current: list[Stream] = [Immediate()]


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    _current.append(chosen)
    try:
        yield
    finally:
        _current.pop()


def current_stream() -> Stream:
    return _current[-1]


device_module = SimpleNamespace(
    Stream=Stream, Event=Event, stream=stream, current_stream=current_stream, __name__="simulated"
)
