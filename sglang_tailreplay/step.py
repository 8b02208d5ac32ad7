"""What the scheduler tells a forward pass: which rows it stores, which states it rebuilds, which it saves.

Made on the scheduler thread, of integers; a Step rides on the ScheduleBatch to the pass.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tailreplay.pass_anchors import Keep

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """One request whose states are to be rebuilt at its boundary."""

    rid: str
    slot: torch.Tensor  # [] device integer: the request's state slot, zeroed before the replay
    rows: np.ndarray  # [k] int64: the rows of the tail; k may be 0 with an anchor
    token_ids: np.ndarray  # [k] int64: the tokens of the tail, for the group that starts from the embedding
    anchor: int | None = None  # where in the anchor store the state before the tail is; None: zero


class Take(NamedTuple):
    """A state to be saved when the pass has run."""

    slot: torch.Tensor  # [] device integer
    anchor: int  # where in the anchor store


class Sample(NamedTuple):
    """A hit whose next-token logits are to be kept."""

    index: int  # of its request in the batch
    tokens: array  # of int64, all that come before


class Tokens(NamedTuple):
    """Whose a pass's tokens are."""

    owners: np.ndarray  # [T] int64: the number of each token's request
    positions: np.ndarray  # [T] int64: where the token is in it
    decode: bool = False  # one token per request, and more passes like this one are likely to follow


def join(*parts: Tokens) -> Tokens:
    """The tokens of passes, one after another."""
    return Tokens(*(np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:2]))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass has to store and to rebuild."""

    rows: np.ndarray  # [T] int64: where the hidden states of the pass's tokens go, NO_ROW for none
    hits: tuple[Hit, ...] = ()
    takes: tuple[Take, ...] = ()
    samples: tuple[Sample, ...] = ()
    keeps: tuple[Keep, ...] = ()
    tokens: Tokens | None = None  # None where nobody asks


def mix(prefill: Step | None, decode: Step | None) -> Step | None:
    """The step of a prefill batch that takes the running requests along, their tokens behind its own."""
    if prefill is None or decode is None:
        return prefill
    rows, takes = np.concatenate((prefill.rows, decode.rows)), prefill.takes + decode.takes
    tokens = join(prefill.tokens, decode.tokens) if prefill.tokens is not None and decode.tokens is not None else None
    return Step(rows, prefill.hits, takes, prefill.samples, prefill.keeps, tokens)
