"""Lanes: work that runs beside the forward pass, and the events by which it is handed over.

    forward ── made ──►  copy: rows out, rows in  ── fetched ──►  replay  ── restored ──►  forward

A hand-over is always the same three lines:

    written = lanes.mark_current("hiddens written")    # forward lane
    with lanes.copy.after(written):                    # waits on the device, not on the host
        lanes.copy.reads(hiddens)                      # keeps the memory until the copy lane is done with it
        ...

On CUDA a lane is a stream. Without CUDA the same code runs in order, and every wait is empty.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a lane's work. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the work before the event is done."""

    def synchronize(self) -> None:
        """Blocks the host until the work before the event is done."""


class Lane(ABC):
    """Work in order, beside the other lanes."""

    name: str

    @abstractmethod
    def after(self, *events: Event):
        """Context manager: torch work inside it runs on this lane, after `events`. The host does not wait."""

    @abstractmethod
    def record(self, name: str) -> Event:
        """Event after all work that the lane was given so far."""

    def reads(self, *tensors: torch.Tensor) -> None:
        """Says that the lane, from here on, reads tensors that another lane made. Keeps their memory: see `keep`."""
        for tensor in tensors:
            keep(tensor, self)

    def writes(self, *tensors: torch.Tensor) -> None:
        """Says that the lane, from here on, writes the tensors. Keeps their memory: see `keep`."""
        for tensor in tensors:
            keep(tensor, self)


def keep(tensor: torch.Tensor, lane: Lane) -> None:
    """Memory of a tensor that another lane allocated is not reused before `lane` is done with its work so far.

    "So far" counts from the moment the tensor is freed. Needed once per lane and tensor; does nothing on a CPU.
    """
    if tensor.is_cuda and isinstance(lane, CudaLane):
        tensor.record_stream(lane.stream)


class CudaLane(Lane):
    """A CUDA stream."""

    def __init__(self, name: str, device: torch.device, priority: int = 0, timing: bool = False) -> None:
        """Negative priority: its kernels start before those of other lanes. `timing` makes events measure time."""
        self.name = name
        self.timing = timing
        self.stream = torch.cuda.Stream(device, priority=priority)

    @contextmanager
    def after(self, *events: torch.cuda.Event) -> Iterator[None]:
        for event in events:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def record(self, name: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.timing)
        event.record(self.stream)
        return event


class DoneEvent:
    """Event of work that ran in order: done when it is made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class InlineLane(Lane):
    """Runs everything at once, in order, on the caller's thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def after(self, *events: Event) -> Iterator[None]:
        yield

    def record(self, name: str) -> Event:
        return DoneEvent()


class CallersLane(InlineLane):
    """Runs everything in order on the caller's CUDA stream. The host is ahead of that stream: its events are not done
    when they are made."""

    def record(self, name: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return event


class Lanes:
    """The lanes of one device: copy and replay, and the forward pass, which is whatever stream the caller is on."""

    def __init__(self, copy: Lane, replay: Lane, host: Lane) -> None:
        self.copy = copy  # rows between host and GPU, in the order in which they were asked for
        self.replay = replay  # rebuilds states
        self.host = host  # this thread: `host.writes(buffer)` says that the CPU changes a buffer that lanes read

    @staticmethod
    def create(device: torch.device | str, timing: bool = False, overlap: bool = True) -> "Lanes":
        """Lanes for a device. With `timing`, events give `elapsed_time` (CUDA only). Without `overlap` all of them are
        the caller's stream."""
        device = torch.device(device)
        host = InlineLane("host")
        if device.type != "cuda":
            return Lanes(InlineLane("copy"), InlineLane("replay"), host)
        if not overlap:
            return Lanes(CallersLane("copy"), CallersLane("replay"), host)
        # Rows out must not fall behind the forward pass that makes them, and a waiting request needs rows in.
        copy = CudaLane("copy", device, priority=-1, timing=timing)
        return CudaLanes(copy, CudaLane("replay", device, timing=timing), host)

    def mark_current(self, name: str) -> Event:
        """Event after all work on the caller's stream so far: what another lane waits for before it reads."""
        return DoneEvent()

    def current_waits(self, event: Event) -> None:
        """The caller's stream waits for the event. The host does not."""

    def current_reads(self, *tensors: torch.Tensor) -> None:
        """Says that the caller's stream, from here on, reads tensors that another one made, and may be dropped before
        it has: their memory is not reused until then."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CudaLanes(Lanes):
    """Lanes on CUDA streams; the caller's stream is torch's current one."""

    def mark_current(self, name: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self.copy.timing)
        event.record(torch.cuda.current_stream(self.copy.stream.device))
        return event

    def current_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.copy.stream.device).wait_event(event)
