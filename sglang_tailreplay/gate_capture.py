"""Taking the inputs of the gates out of a forward pass: `a` of every GDN layer, from which log-gates are made.

As in capture.py: inside CUDA graphs it is copied to a fixed buffer, which is copied aside after the graph has run; a
pass outside of them gets memory of its own. A prefill is sent on at once, decode steps a few together, so that
following tokens of a request make runs. What waits is not known to the host, and counts as if nothing decayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_tailreplay.capture import STEPS_TOGETHER, TOKENS_TOGETHER, keep_last
from sglang_tailreplay.radix.rows import NO_ROW
from sglang_tailreplay.step import Step, Tokens, join

Tensor = torch.Tensor
# a [T, L, HV], row ids [T], their tokens, their owners, the L layers
WriteOut = Callable[[Tensor, np.ndarray, Tokens, np.ndarray, Sequence[Any]], object]


class _Pass(NamedTuple):
    ids: np.ndarray  # [T]
    owners: np.ndarray  # [T], of Decays
    tokens: Tokens


class _Waiting(NamedTuple):
    a: Tensor  # [T, L, HV]
    of: _Pass


class GateCapture:
    """One forward pass at a time; `begin` and `end` are called around it."""

    def __init__(
        self,
        layers: Sequence[int],
        write_out: WriteOut,
        owners: Callable[[np.ndarray], np.ndarray],
        in_graph_capture: Callable[[], bool],
    ):
        """`layers`: ids of the GDN layers."""
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._modules: list[Any] = [None] * len(layers)  # SGLang's RadixLinearAttention: A_log and dt_bias
        self._write_out, self._owners, self._in_graph_capture = write_out, owners, in_graph_capture
        self._graph_buffer: Tensor | None = None  # [most tokens of a graph, L, HV]
        self._pass: _Pass | None = None
        self._a: Tensor | None = None  # of a pass outside of graphs
        self._missing: set[int] = set()
        self._waiting: list[_Waiting] = []

    def allocate_graph_buffer(
        self, max_tokens: int, heads: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Must run before CUDA graphs are captured: its address becomes part of them."""
        self._graph_buffer = torch.zeros(max_tokens, len(self._index), heads, dtype=dtype, device=device)

    def begin(self, step: Step | None) -> None:
        """A forward pass starts; without a row for any of its tokens nothing is kept of it."""
        assert self._pass is None, "a forward pass began inside another one"
        if step is not None and step.tokens is not None and (step.rows != NO_ROW).any():
            self._pass = _Pass(step.rows, self._owners(step.rows), step.tokens)
            self._missing = set(self._index)

    def receive(self, layer: Any, a: Tensor) -> None:
        """a [T', HV] of a GDN layer, T' >= T where the pass is padded. It may change as soon as this returns."""
        index = self._index[layer.layer_id]
        self._modules[index] = layer
        if self._in_graph_capture():
            tokens, room = a.shape[0], self._graph_buffer.shape[0]
            assert tokens <= room, f"a CUDA graph of {tokens} tokens, but the buffer of the capture has {room}"
            self._graph_buffer[:tokens, index].copy_(a)
        elif self._pass is not None:
            tokens = len(self._pass.ids)
            if self._a is None:
                self._a = a.new_empty(tokens, len(self._index), a.shape[1])
            self._a[:, index].copy_(a[:tokens])
            self._missing.discard(layer.layer_id)

    def end(self, ran_graph: bool) -> None:
        """The pass was launched. AssertionError if it went past a layer."""
        now, a, missing = self._pass, self._a, self._missing
        self.abandon()
        if now is None:
            return
        if ran_graph:
            a = self._graph_buffer[: len(now.ids)].clone()
        else:
            assert not missing, f"the forward pass went past the gates of layers {sorted(missing)}"
        self._waiting.append(_Waiting(a, now))
        tokens = sum(len(waiting.of.ids) for waiting in self._waiting)
        if not now.tokens.decode or len(self._waiting) == STEPS_TOGETHER or tokens >= TOKENS_TOGETHER:
            self.flush()

    def abandon(self) -> None:
        """The pass failed; nothing is known of its tokens."""
        self._pass, self._a, self._missing = None, None, set()

    def flush(self) -> None:
        """Send on what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        a = waiting[0].a if len(waiting) == 1 else torch.cat([one.a for one in waiting])
        passes = [one.of for one in waiting]
        ids, owners = (np.concatenate(parts) for parts in list(zip(*passes, strict=True))[:2])
        self._write_out(a, keep_last(ids), join(*(one.tokens for one in passes)), owners, self._modules)
