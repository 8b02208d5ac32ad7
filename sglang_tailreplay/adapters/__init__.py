"""SGLang models as groups of replayable layers: one adapter per model family, found from the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_tailreplay.adapters import olmo_hybrid, qwen3_5, qwen3_next
from sglang_tailreplay.adapters.family import Family
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.gdn import make_core
from sglang_tailreplay.replay.groups import EMBEDDING, Group, find_groups
from sglang_tailreplay.replay.layers import GdnLayer

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

FAMILIES: tuple[Family, ...] = (qwen3_5.FAMILY, qwen3_next.FAMILY, olmo_hybrid.FAMILY)
ARCHITECTURES = tuple(architecture for family in FAMILIES for architecture in family.architectures)


class HybridModel(NamedTuple):
    """What the rest of this package knows about a model."""

    family: Family
    groups: tuple[Group, ...]
    layers: tuple[torch.nn.Module, ...]  # SGLang's decoder layers, all of them
    embed: torch.nn.Module  # token ids [T] -> h [T, d]
    hidden_size: int

    @property
    def row_groups(self) -> int:
        """G: groups whose input is stored; the one that starts from the embedding needs no row."""
        return sum(group.source != EMBEDDING for group in self.groups)

    def row_of_layer(self) -> dict[int, int]:
        """First layer of a group -> the group's index in the row store."""
        return {group.layers[0]: group.row for group in self.groups if group.source != EMBEDDING}


def find_model(model: torch.nn.Module) -> HybridModel:
    """The hybrid inside a loaded SGLang model. TailReplayError for a model that no adapter knows."""
    backbone = getattr(model, "model", None)
    layers = tuple(getattr(backbone, "layers", ()))
    if not layers:
        raise _unknown(model, "it has no decoder layers at model.layers")
    why = ""
    for family in FAMILIES:
        kinds = family.layer_kinds(layers)
        if isinstance(kinds, str):
            why = why or kinds
            continue
        try:
            groups = find_groups(kinds)
        except ValueError as error:
            raise _unknown(model, str(error)) from None
        return HybridModel(family, groups, layers, backbone.embed_tokens, backbone.config.hidden_size)
    raise _unknown(model, why)


def _unknown(model: torch.nn.Module, why: str) -> TailReplayError:
    return TailReplayError(
        f"model {type(model).__name__}: {why}. Supported: {', '.join(ARCHITECTURES)}. "
        "Start without --radix-cache-backend tail_replay, or with --tail-replay-mode off."
    )


def replay_layers(model: HybridModel, model_runner: ModelRunner) -> tuple[tuple[Group, tuple[GdnLayer, ...]], ...]:
    """Groups with their layers, ready for a ReplayEngine. Built once the state pools exist."""
    core, make = make_core(model_runner), model.family.gdn_layer
    return tuple((group, tuple(make(model.layers[i], core) for i in group.layers)) for group in model.groups)
