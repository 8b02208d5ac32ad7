"""Sums of log-gates in pinned host memory, one row of numbers for each row of the row store (radix/decays.py).

    forward lane   pass, gate inputs a of all GDN layers  |  next pass ...
    copy lane                                             | g = -exp(A) softplus(a + dt), summed up in runs | sums out
    host                                                                            sums may be read, once that is done

A token takes 2 bytes x value heads x GDN layers: 1.5 KB on the 4B shape and 4.5 on the 27B, 4 % and 3 % of its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from sglang_tailreplay.cuda_streams.lanes import Event, Lanes
from sglang_tailreplay.cuda_streams.mover import IdRing
from sglang_tailreplay.cuda_streams.pinned import PinningError, pinned_empty
from sglang_tailreplay.cuda_streams.rows import VECTOR, scatter_rows
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.radix.decays import LEAST, ROUNDING, RUN, Decays
from sglang_tailreplay.step import Tokens

Tensor = torch.Tensor
STORED = torch.float16
LOWEST = -6e4  # what is below keeps nothing anyway, and float16 ends at -65504
_TOGETHER = 2048  # tokens whose sums are made at a time: what lies between is in float32, and the GPU is full of KV


def decay_width(numbers: int) -> int:
    """Numbers in a stored row of sums of that many heads: whole vectors of a GPU's copies."""
    vector = VECTOR // STORED.itemsize
    return -(-numbers // vector) * vector


def decay_bytes(heads: int, layers: int) -> int:
    """Of one token: `heads` value heads in each of so many GDN layers."""
    return decay_width(heads * layers) * STORED.itemsize


class Runs(NamedTuple):
    """How the tokens of some passes are cut into runs."""

    members: np.ndarray  # [N, W] int64: indices of the tokens, padded with T; each token is in one run
    steps: np.ndarray  # [T] int64: tokens of its run before it


def cut(tokens: Tokens) -> Runs:
    """Runs of up to 64 tokens of one request that follow each other. Tokens of a request lie in order."""
    T = len(tokens.owners)
    order = np.argsort(tokens.owners, kind="stable")
    owners, positions = tokens.owners[order], tokens.positions[order]
    begins = np.ones(T, dtype=bool)
    begins[1:] = (owners[1:] != owners[:-1]) | (positions[1:] != positions[:-1] + 1)
    index = np.arange(T)
    along = index - np.maximum.accumulate(np.where(begins, index, 0))  # tokens of the stretch before each
    step = along % RUN
    run = np.cumsum(step == 0) - 1
    members = np.full((run[-1] + 1 if T else 0, step.max(initial=0) + 1), T, dtype=np.int64)
    members[run, step] = order
    steps = np.empty(T, dtype=np.int64)
    steps[order] = step
    return Runs(members, steps)


def run_sums(a: Tensor, decay: Tensor, bias: Tensor, members: Tensor) -> Tensor:
    """Sums of log-gates [T + 1, width] float16, rounded towards zero, of the tokens in `members`; the last row is of
    no token. a [T, D] in the model's dtype, decay (-exp(A_log)) and bias [D] float32, members [N, W] int64."""
    T, D = a.shape
    sums = torch.zeros(T + 1, decay_width(D), dtype=STORED, device=a.device)
    for some in members.split(max(1, _TOGETHER // max(members.shape[1], 1))):
        g = functional.softplus(a[some.clamp(max=T - 1)].float() + bias).mul_(decay)  # [n, W, D]
        g = g.cumsum(1).mul_(1 - ROUNDING / 2).add_(LEAST / 2).nan_to_num_(nan=0.0).clamp_(LOWEST, 0)
        sums[some.flatten(), :D] = g.flatten(0, 1).to(STORED)
    return sums


class DecayStore:
    """Makes sums of gate inputs and sends them to the host."""

    def __init__(self, rows: int, layers: int, heads: int, lanes: Lanes, device: torch.device):
        """`rows`: those of the row store; `heads`: value heads of each of `layers` GDN layers."""
        try:
            self._buffer = pinned_empty((1, rows, decay_width(layers * heads)), STORED)
        except PinningError as error:
            raise TailReplayError(f"--tail-replay-max-residual: {error}; leave it out, or free host memory") from error
        self._rows = self._buffer.tensor
        if not torch.cuda.is_available():
            self._rows.fill_(float("nan"))  # sums that are read before they are there must not look like any
        self._lanes = lanes
        self._ring = IdRing(lanes, device)
        self._on_their_way: deque[tuple[int, Event]] = deque()  # ticket, after it
        self.decays = Decays(self._rows[0].numpy()[:, : layers * heads])

    def write_out(self, a: Tensor, ids: np.ndarray, tokens: Tokens, owners: np.ndarray, layers: Sequence) -> None:
        """a [T, L, HV]: what goes into the gates of the GDN layers, made on the current stream and changed no more.

        ids [T]: the tokens' rows, none twice, below 0 for none; `owners` of them by Decays.owners when the pass was
        launched; `layers` [L] have A_log and dt_bias, [HV] each. The host does not wait.
        """
        runs = cut(tokens)
        made = self._lanes.mark_current("gate inputs made")
        copy = self._lanes.copy
        with copy.after(made):
            copy.reads(a)
            copy.writes(self._rows)
            decay = -torch.cat([layer.A_log.detach().flatten() for layer in layers]).float().exp()
            bias = torch.cat([layer.dt_bias.detach().flatten() for layer in layers]).float()
            members = self._ring.upload(torch.from_numpy(runs.members).flatten()).view(runs.members.shape)
            sums = run_sums(a.flatten(1), decay, bias, members)
            scatter_rows(sums[: len(ids)], self._rows, 0, self._ring.upload(torch.from_numpy(ids)))
            written = copy.record("sums written")
        self._on_their_way.append((self.decays.written(ids, runs.steps, owners), written))

    def look(self) -> None:
        """Note what has arrived. Never waits."""
        while self._on_their_way and self._on_their_way[0][1].query():
            self.decays.arrived(self._on_their_way.popleft()[0])
