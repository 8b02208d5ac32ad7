"""What our classes override must be there to be overridden: a method that another SGLang calls by another name would be
passed by without a word, and the tree would do what it does for recurrent states."""

import inspect

import pytest
from sglang.srt.mem_cache.unified_cache.components.mamba_component import MambaComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tailreplay import host_tier
from sglang_tailreplay.radix.component import TailReplayComponent
from sglang_tailreplay.radix.tree import TailReplayCache

# What is ours alone, and called by us alone.
OWN = {
    TailReplayComponent: {
        *("set_pool", "track", "release", "alloc", "span", "validity", "usable_boundary", "within_generation", "tail"),
        *("forget_nodes", "check_invariants"),
    },
    TailReplayCache: {"check_invariants"},
    host_tier.KvController: set(),
    host_tier.KvOnlyStack: set(),
}


def overridden(ours: type) -> list[str]:
    methods = [name for name, value in vars(ours).items() if inspect.isfunction(value) and not name.startswith("_")]
    return [name for name in methods if name not in OWN[ours] and name not in ours.__annotations__]


CASES = [(ours, name) for ours in OWN for name in overridden(ours)]


@pytest.mark.parametrize("ours, name", CASES, ids=lambda case: getattr(case, "__name__", case))
def test_a_method_overrides_one_of_sglang(ours, name):
    base = inspect.getattr_static(ours.__base__, name, None)
    assert base is not None, f"{ours.__base__.__name__} has no {name}"
    wanted = [p for p in inspect.signature(base).parameters.values() if p.kind is not p.VAR_KEYWORD]
    mine = inspect.signature(getattr(ours, name))
    mine.bind(*(None for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD), **{
        p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY
    })  # fmt: skip
    # SGLang gives most of them by name.
    takes_any = any(p.kind is p.VAR_KEYWORD for p in mine.parameters.values())
    assert takes_any or set(mine.parameters) >= {p.name for p in wanted}


def test_the_classes_that_are_replaced_are_the_bases():
    assert TailReplayComponent.__base__ is MambaComponent and TailReplayCache.__base__ is UnifiedRadixCache
    assert {name for _, name in CASES} >= {"match_prefix", "reset", "discard_deleted_session_leaf", "start_loading"}
