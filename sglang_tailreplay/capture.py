"""Taking hidden states out of a forward pass: what enters the first GDN layer of every group.

SGLang hands a layer's incoming residual stream to `captured_last_layer_outputs` (the hook of its draft models): exact,
with all fusions and reductions done. Eager passes copy it aside and send it to the row store at once, group by group.
Inside CUDA graphs it is copied to a fixed buffer, which is copied aside after the graph has run; a few decode steps go
to the row store together, because a hand-over costs the host more than the copy costs the link.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_tailreplay.radix.rows import NO_ROW, no_rows

# group or None for all, hidden states [T, d] or [G, T, d], row ids [T]
WriteOut = Callable[[int | None, torch.Tensor, np.ndarray], object]
STEPS_TOGETHER = 8  # decode steps per write-out ...
TOKENS_TOGETHER = 1024  # ... unless so many tokens wait


class Capture:
    """One forward pass at a time; `begin` and `end` are called around it."""

    def __init__(self, row_of_layer: dict[int, int], write_out: WriteOut, in_graph_capture: Callable[[], bool]):
        self._row_of_layer = row_of_layer
        self._write_out = write_out
        self._in_graph_capture = in_graph_capture
        self._graph_buffer: torch.Tensor | None = None  # [G, most tokens of a graph, d]
        self._rows: np.ndarray | None = None
        self._missing: set[int] = set()
        self._pending: list[tuple[torch.Tensor, np.ndarray]] = []  # passes that ran in a graph: [G, T, d], [T]

    def allocate_graph_buffer(
        self, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Must run before CUDA graphs are captured: its address becomes part of them."""
        shape = (len(self._row_of_layer), max_tokens, hidden_size)
        self._graph_buffer = torch.zeros(shape, dtype=dtype, device=device)

    def sink_for(self, layer: int) -> Sink | None:
        """What to give layer as `captured_last_layer_outputs`; None if nothing of it is to be stored."""
        row = self._row_of_layer.get(layer)
        if row is None or (self._rows is None and not self._in_graph_capture()):
            return None
        return Sink(self, row)

    def begin(self, rows: np.ndarray | None) -> None:
        """A forward pass over len(rows) tokens starts; None or all NO_ROW: nothing is stored."""
        assert self._rows is None, "a forward pass began inside another one"
        self._rows = rows if rows is not None and (rows != NO_ROW).any() else None
        self._missing = set(self._row_of_layer.values()) if self._rows is not None else set()

    def end(self, ran_graph: bool) -> None:
        """The pass was launched. AssertionError if a group's hidden states did not come out of it."""
        rows, missing, self._rows, self._missing = self._rows, self._missing, None, set()
        if rows is None:
            return
        if ran_graph:
            # The next graph overwrites the buffer; the copy is in order behind this one and before that one.
            self._pending.append((self._graph_buffer[:, : len(rows)].clone(), rows))
            waiting = sum(len(rows) for _, rows in self._pending)
            if len(self._pending) == STEPS_TOGETHER or waiting >= TOKENS_TOGETHER:
                self.flush()
        else:
            assert not missing, f"the forward pass went past the capture of groups {sorted(missing)}"

    def flush(self) -> None:
        """Send what waits to the row store: before rows are fetched, and before a row may be written again."""
        if self._pending:
            hidden, rows = zip(*self._pending, strict=True)
            self._pending = []
            # A prefill waits alone and is large: it is not copied a second time.
            together = hidden[0] if len(hidden) == 1 else torch.cat(hidden, dim=1)
            self._write_out(None, together, keep_last(np.concatenate(rows)))

    def abandon(self) -> None:
        """The pass failed; its rows are never read, because its requests fail with it."""
        self._rows, self._missing = None, set()

    def receive(self, row: int, hidden: torch.Tensor) -> None:
        """hidden [T', d], T' >= T where the pass is padded. It may change as soon as this returns."""
        if self._in_graph_capture():
            tokens, room = hidden.shape[0], self._graph_buffer.shape[1]
            assert tokens <= room, f"a CUDA graph of {tokens} tokens, but the buffer of the capture has {room}"
            self._graph_buffer[row, :tokens].copy_(hidden)
            return
        self._missing.discard(row)
        self.flush()
        self._write_out(row, hidden[: len(self._rows)].clone(), self._rows)


def keep_last(ids: np.ndarray) -> np.ndarray:
    """Of a row that is written more than once only the last write counts; the others become NO_ROW.

    It happens where a request ended between two decode steps and its row went to another one.
    """
    _, from_end = np.unique(ids[::-1], return_index=True)
    last = len(ids) - 1 - from_end
    kept = no_rows(len(ids))
    kept[last] = ids[last]
    return kept


class Sink:
    """Stands where SGLang expects a list of captured hidden states (AuxHiddenStateAccumulator)."""

    copies_on_append = True  # SGLang need not clone for us

    def __init__(self, capture: Capture, row: int):
        self._capture = capture
        self._row = row

    def append(self, hidden: torch.Tensor) -> None:
        self._capture.receive(self._row, hidden)
