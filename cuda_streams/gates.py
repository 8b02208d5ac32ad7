"""Gates: points in a lane's work that a captured CUDA graph waits for, every time it is launched.

An ordinary event that is waited for while a graph is captured becomes an edge inside the graph. A gate becomes a node
that waits for work outside of it: for what the gate was last opened behind when the graph is launched. A gate that was
opened before stays open, so a graph that has nothing to wait for does not wait.
"""

from typing import Protocol

import torch

from sglang_tailreplay.cuda_streams.lanes import CudaLane, Lane, Lanes


class Gate(Protocol):
    def open(self, lane: Lane) -> None:
        """Opens when the lane gets here. Must precede the launch that is to wait for it."""

    def wait(self) -> None:
        """The caller's stream, or the graph that is captured on it, waits until the gate is open."""


class CudaGate:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(external=True)
        # An event that was never recorded would leave no trace in a graph.
        self._event.record(torch.cuda.current_stream(device))

    def open(self, lane: CudaLane) -> None:
        self._event.record(lane.stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def make_gates(count: int, lanes: Lanes, device: torch.device) -> tuple[Gate, ...]:
    """`count` open gates; none where the replay lane is no stream of its own."""
    if not isinstance(lanes.replay, CudaLane):
        return ()
    return tuple(CudaGate(device) for _ in range(count))
