"""Which GDN layers are replayed from which rows."""

from collections.abc import Sequence
from typing import NamedTuple

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
EMBEDDING = -1


class Group(NamedTuple):
    """A run of GDN layers that is replayed on its own, from the residual stream that enters it."""

    source: int  # the full-attention layer whose output enters the group; EMBEDDING for the token embedding
    layers: tuple[int, ...]  # the GDN layers, ascending
    row: int  # index of the group's rows in the row store [G, R, H]; EMBEDDING for the group that needs none


def find_groups(layer_kinds: Sequence[str]) -> tuple[Group, ...]:
    """Groups of a model, from the first layer to the last. A full-attention layer that no GDN layer follows has none.

    Raises: ValueError for an unknown kind, and for a model without a full-attention or without a GDN layer.
    """
    unknown = sorted(set(layer_kinds) - {FULL_ATTENTION, LINEAR_ATTENTION})
    if unknown:
        raise ValueError(f"unknown layer kind {unknown[0]!r}: known are {FULL_ATTENTION} and {LINEAR_ATTENTION}")
    for kind in (FULL_ATTENTION, LINEAR_ATTENTION):
        if kind not in layer_kinds:
            raise ValueError(f"no {kind} layer among {len(layer_kinds)} layers: tail replay needs a hybrid model")

    runs: list[tuple[int, list[int]]] = [(EMBEDDING, [])]
    for index, kind in enumerate(layer_kinds):
        if kind == FULL_ATTENTION:
            runs.append((index, []))
        else:
            runs[-1][1].append(index)

    groups: list[Group] = []
    rows = 0
    for source, layers in runs:
        if not layers:
            continue
        groups.append(Group(source, tuple(layers), EMBEDDING if source == EMBEDDING else rows))
        rows += source != EMBEDDING
    return tuple(groups)
