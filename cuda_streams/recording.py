"""Lanes for tests: work runs in order, and every access that only luck would have ordered raises.

Each lane has a vector clock. An event carries the clock of the moment it was recorded, a wait joins it, and a storage
remembers who read and wrote which of its bytes when. Two accesses of which one writes must be ordered by events; if all
are, every interleaving that a device may choose gives the same values as the order in which the test ran.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sglang_tailreplay.cuda_streams.lanes import Lane, Lanes

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two lanes use a tensor and no event orders them."""


class LogEntry(NamedTuple):
    lane: str
    op: str  # wait, record, reads, writes
    name: str  # of the event; shape of the tensor


@dataclass
class RecordedEvent:
    """Event with the clock of its lane."""

    name: str
    clock: Clock
    lanes: "RecordingLanes"

    def query(self) -> bool:
        return all(self.lanes.clocks["host"].get(lane, 0) >= time for lane, time in self.clock.items())

    def synchronize(self) -> None:
        self.lanes.join("host", self)


class Access(NamedTuple):
    """One use of bytes [start, end) of a storage, at a moment of a lane's clock."""

    lane: str
    op: str
    time: int
    start: int
    end: int

    def conflicts(self, other: "Access") -> bool:
        return "writes" in (self.op, other.op) and self.start < other.end and other.start < self.end

    def within(self, other: "Access") -> bool:
        return other.start <= self.start and self.end <= other.end


@dataclass
class Storage:
    """Uses of a storage that later ones may conflict with."""

    tensor: torch.Tensor  # keeps the storage, so that its address names it for good
    accesses: list[Access] = field(default_factory=list)


class RecordingLane(Lane):
    """Part of `RecordingLanes`."""

    def __init__(self, name: str, lanes: "RecordingLanes") -> None:
        self.name = name
        self.lanes = lanes

    @contextmanager
    def after(self, *events: RecordedEvent) -> Iterator[None]:
        for event in events:
            self.lanes.join(self.name, event)
        outer, self.lanes.current = self.lanes.current, self
        try:
            yield
        finally:
            self.lanes.current = outer

    def record(self, name: str) -> RecordedEvent:
        self.lanes.tick(self.name)
        self.lanes.log.append(LogEntry(self.name, "record", name))
        return RecordedEvent(name, dict(self.lanes.clocks[self.name]), self.lanes)

    def reads(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.lanes.access(self.name, "reads", tensor)

    def writes(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.lanes.access(self.name, "writes", tensor)


class RecordingLanes(Lanes):
    """Fake lanes with a log and a race check. `forward` stands for the stream that the caller starts on."""

    def __init__(self) -> None:
        self.log: list[LogEntry] = []
        self.clocks: dict[str, Clock] = {}
        self._storages: dict[int, Storage] = {}
        super().__init__(*(self._lane(name) for name in ("copy", "replay", "host")))
        self.forward = self._lane("forward")
        self.current: RecordingLane = self.forward

    def _lane(self, name: str) -> RecordingLane:
        self.clocks[name] = {}
        return RecordingLane(name, self)

    def mark_current(self, name: str) -> RecordedEvent:
        return self.current.record(name)

    def current_waits(self, event: RecordedEvent) -> None:
        self.join(self.current.name, event)

    def current_reads(self, *tensors: torch.Tensor) -> None:
        self.current.reads(*tensors)

    def join(self, lane: str, event: RecordedEvent) -> None:
        """Work that `lane` gets from here on comes after the event."""
        self.log.append(LogEntry(lane, "wait", event.name))
        clock = self.clocks[lane]
        for other, time in event.clock.items():
            clock[other] = max(clock.get(other, 0), time)

    def tick(self, lane: str) -> Clock:
        """The lane's next moment. What the host did before it gave the lane this work has happened."""
        if lane != "host":
            for other, time in self.clocks["host"].items():
                self.clocks[lane][other] = max(self.clocks[lane].get(other, 0), time)
        clock = self.clocks[lane]
        clock[lane] = clock.get(lane, 0) + 1
        return clock

    def access(self, lane: str, op: str, tensor: torch.Tensor) -> None:
        """Raises: RaceError where an earlier access is not ordered before this one."""
        self.log.append(LogEntry(lane, op, str(tuple(tensor.shape))))
        if tensor.numel() == 0:  # has no address of its own
            return
        clock = self.tick(lane)
        start = tensor.storage_offset()
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        new = Access(lane, op, clock[lane], start * tensor.itemsize, (start + length) * tensor.itemsize)
        storage = self._storages.setdefault(tensor.untyped_storage().data_ptr(), Storage(tensor))
        for old in storage.accesses:
            if old.conflicts(new) and clock.get(old.lane, 0) < old.time:
                shape = tuple(tensor.shape)
                raise RaceError(f"{lane} {op} a tensor {shape} that {old.lane} {old.op}, and has not waited for it")
        # What is ordered before a write need not be compared again with what is ordered after the write.
        storage.accesses = [old for old in storage.accesses if not (op == "writes" and old.within(new))] + [new]
