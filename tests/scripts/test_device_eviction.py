"""The plugin that pushes KV out of the GPU, against a tree that only counts."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PLUGIN = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "eviction_plugin" / "device_eviction.py"


@pytest.fixture
def plugin(monkeypatch):
    params = SimpleNamespace(EvictParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", params)
    spec = importlib.util.spec_from_file_location("device_eviction", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tree:
    """`polls`: how often transfers are asked about before they are done; protected: tokens of running requests."""

    def __init__(self, polls=0, protected=0):
        self.cache_controller = object()
        self.polls, self.protected, self.cached = polls, protected, 100
        self.ongoing_load_back = {}
        self.log = []

    @property
    def ongoing_write_through(self):
        return {1: "node"} if self.polls else {}

    def check_hicache_events(self):
        self.polls -= 1
        self.log.append("poll")

    def full_evictable_size(self):
        return self.cached

    def full_protected_size(self):
        return self.protected

    def evict(self, params):
        self.log.append("evict")
        self.cached -= params.num_tokens


def test_all_is_evicted_once_it_has_reached_the_host(plugin):
    tree = Tree(polls=3)
    plugin.evict_device_cache(SimpleNamespace(tree_cache=tree))
    assert (tree.log, tree.cached) == (["poll"] * 3 + ["evict"], 0)


def test_nothing_is_evicted_without_a_host_tier(plugin):
    tree = Tree()
    tree.cache_controller = None
    with pytest.raises(RuntimeError, match="--enable-hierarchical-cache"):
        plugin.evict_device_cache(SimpleNamespace(tree_cache=tree))
    assert tree.log == [] and tree.cached == 100


def test_nothing_is_evicted_before_a_transfer_ended(plugin, monkeypatch):
    monkeypatch.setattr(plugin, "BACKUP_SECONDS", 0.01)
    tree = Tree(polls=10**9)
    with pytest.raises(RuntimeError, match="did not end"):
        plugin.evict_device_cache(SimpleNamespace(tree_cache=tree))
    assert "evict" not in tree.log


def test_kv_of_a_running_request_is_an_error(plugin):
    with pytest.raises(RuntimeError, match="5 cached tokens stay"):
        plugin.evict_device_cache(SimpleNamespace(tree_cache=Tree(protected=5)))
