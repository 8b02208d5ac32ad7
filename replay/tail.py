"""How long a tail is and how tails share launches. Integers only."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple


def tail_length(m: int, ratio: float | str | Fraction, min_tokens: int, max_tokens: int | None = None) -> int:
    """Tokens to replay before boundary m: min(m, max_tokens, max(min_tokens, ceil(ratio * m))).

    The ratio is read as it is written: 0.05 means 1/20, so that tail_length(1000, 0.05, ...) is 50 and never 51.

        # [0, m-k) KV reused      [m-k, m) KV reused, state replayed      [m, n) ordinary prefill

    Raises: ValueError unless 0 < ratio <= 1, m >= 0 and both bounds are at least 1.
    """
    exact = ratio if isinstance(ratio, Fraction) else Fraction(str(ratio))
    if not 0 < exact <= 1:
        raise ValueError(f"ratio must lie in (0, 1], got {ratio}")
    if m < 0:
        raise ValueError(f"boundary must not be negative, got {m}")
    if min_tokens < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"min_tokens and max_tokens must be at least 1, got {min_tokens} and {max_tokens}")
    k = max(min_tokens, ceil(exact * m))
    if max_tokens is not None:
        k = min(k, max_tokens)
    return min(m, k)


class Piece(NamedTuple):
    """Tokens [start, end) of one hit's tail."""

    hit: int  # index into the tails
    start: int
    end: int
    continues: bool  # False: starts from a zero state; True: from the state that the piece before it left in the slot

    @property
    def length(self) -> int:
        return self.end - self.start


class Launch(NamedTuple):
    """Pieces that are replayed together: of different hits, with ascending and consecutive hit numbers."""

    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)


def pack(
    tails: Sequence[int], max_tokens: int, max_pieces: int | None = None, seeded: Sequence[bool] | None = None
) -> tuple[Launch, ...]:
    """Launches of at most max_tokens tokens and max_pieces pieces that cover every tail once. They must run in order.

    A tail is cut only where it is longer than the budget, at multiples of the budget, so where a hit is cut never
    depends on the hits beside it:

        # [0, max)  from zero      [max, 2*max)  continues      ...      [j*max, tail)  continues

    `seeded[hit]`: the slot holds the state before the tail; the first piece continues it.
    Raises: ValueError for a budget or a tail below 1 (an empty tail would leave the slot's old state in place).
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    launches: list[Launch] = []
    open_pieces: list[Piece] = []
    room = max_tokens
    for hit, tail in enumerate(tails):
        if tail < 1:
            raise ValueError(f"tail of hit {hit} must be at least 1 token, got {tail}")
        for start in range(0, tail, max_tokens):
            continues = start > 0 or (seeded is not None and seeded[hit])
            piece = Piece(hit, start, min(start + max_tokens, tail), continues)
            if piece.length > room or start > 0 or len(open_pieces) == max_pieces:
                launches.append(Launch(tuple(open_pieces)))
                open_pieces, room = [], max_tokens
            open_pieces.append(piece)
            room -= piece.length
    if open_pieces:
        launches.append(Launch(tuple(open_pieces)))
    return tuple(launches)
