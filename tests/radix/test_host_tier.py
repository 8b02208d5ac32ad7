"""KV that moves to the host and back, while its rows stay where they are."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from server_machine import IMAGE, LONG, PROFILE, ServerMachine, bits, budgets, requests, tokens
from tiered_scheduler import FULL_LAYERS, KV_SLOTS, LEAST_LOAD, TieredScheduler

from sglang_tailreplay import host_tier
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.radix.boundary import ROWS_MISSING

POLICIES = ["write_through", "write_through", "write_through_selective", "write_back"]


class TieredMachine(ServerMachine):
    """The same work with a host tier, whose copies and acknowledgements are as late as they like."""

    @initialize(
        ratio=st.sampled_from([0.05, 0.3, 1.0]),
        min_tokens=st.sampled_from([4, 8]),
        max_tokens=st.sampled_from([None, None, 12]),
        mode=st.sampled_from(["replay", "replay", "replay", "zero"]),
        capacity=st.sampled_from([3 * KV_SLOTS, 3 * KV_SLOTS, KV_SLOTS, 40, 7, 0]),
        overlap=st.booleans(),
        host_ratio=st.sampled_from([2.0, 2.0, 1.0, 0.5, 0.2]),
        policy=st.sampled_from(POLICIES),
        early_loads=st.booleans(),
        most=st.sampled_from([None, None, 0, 1]),
    )
    def start(self, ratio, min_tokens, max_tokens, mode, capacity, overlap, host_ratio, policy, early_loads, most):
        config = TailReplayConfig(
            mode=mode, ratio=ratio, min_tokens=min_tokens, max_tokens=max_tokens, max_generation=most
        )
        rows = capacity if mode == "replay" else 0
        self.server = TieredScheduler(config, rows, overlap, host_ratio, policy)
        self.server.early_loads = early_loads
        self.texts = [tokens(56, 0xA5C3F1), tokens(56, 0xA5C3FF)]

    @rule(forward=st.integers(0, 4), write=st.integers(0, 12), load=st.integers(0, 12))
    def advance(self, forward, write, load):
        self.server.advance(forward, write, load)

    @precondition(lambda self: self.server.waiting)
    @rule(index=st.integers(0, 7))
    def load_without_admission(self, index):
        self.server.load_without_admission(self.server.waiting[index % len(self.server.waiting)])

    @rule(request=requests, kept=st.integers(4, 56), budget=budgets, pattern=bits, mixed=st.booleans())
    def come_back_after_all_left_the_device(self, request, kept, budget, pattern, mixed):
        self.serve_to_the_end([request], budget, pattern)
        self.server.drain()
        self.server.evict_kv(KV_SLOTS)
        served = self.texts[-2]
        self.server.arrive(served[:kept] + tokens(5, pattern), 2, plain=max(served) < IMAGE)
        self.server.prefill(budget, self.sampler(pattern), mixed)


class TestTieredServer(TieredMachine.TestCase):
    settings = PROFILE


@pytest.mark.slow
class TestTieredServerForLonger(TieredMachine.TestCase):
    settings = LONG


# ---- single stories ----


def tiered(
    rows: int = 3 * KV_SLOTS, ratio: float = 1.0, overlap: bool = False, host_ratio: float = 2.0, **settings
) -> TieredScheduler:
    return TieredScheduler(TailReplayConfig(ratio=ratio, min_tokens=4), rows, overlap, host_ratio, **settings)


def serve(server: TieredScheduler, prompt: list[int], answer: int = 1):
    req = server.arrive(prompt, answer)
    finish(server)
    return req


def finish(server: TieredScheduler) -> None:
    while not server.idle:
        server.prefill(64, lambda: 1)
        server.decode(lambda: 1)
        server.settle()
    server.drain()  # what was copied is acknowledged


def places(server: TieredScheduler, tokens: list[int]) -> str:
    """For each token d (on the device) or h (on the host only), a capital with a row; a point if it is not cached."""
    text = ""
    for prefix in server.prefixes.path(tokens):
        entry = server.truth.get(prefix)
        place = "." if entry is None else "d" if entry.on_device else "h"
        text += place.upper() if entry is not None and entry.has_row else place
    return text


def rows_of(server: TieredScheduler, req) -> list[int]:
    """Of a finished request's prompt."""
    n = len(req.origin_input_ids)
    return server.cache.rows.tail(server.cache.tree_core.node_by_id(req.last_node), n).rows.tolist()


def leave_the_device(server: TieredScheduler) -> None:
    server.evict_kv(KV_SLOTS)
    assert not any(entry.on_device for entry in server.truth.values())


def test_the_stack_has_kv_only_and_nobody_but_full_attention_waits():
    server = tiered(host_ratio=1.5)
    group = server.controller.mem_pool_host
    assert [entry.name.value for entry in group.entries] == ["kv"]
    assert server.cache.rows._mamba_pool_host is None
    assert server.request_pool.layer_transfer_counter is None  # what GDN layers would wait for
    counter = server.pool.layer_transfer_counter
    assert counter is server.controller.layer_done_counter
    assert counter.num_layers == max(FULL_LAYERS) + 1


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_rows_stay_where_they_are_while_kv_leaves_and_comes_back(policy):
    server = tiered(policy=policy)
    first = serve(server, [1] * 30)
    rows = rows_of(server, first)
    leave_the_device(server)
    assert places(server, [1] * 30) == "H" * 30
    hit = serve(server, [1] * 30 + [2])
    assert (len(hit.prefix_indices), hit.host_hit_length, hit.tail_replay_shrunk) == (30, 30, None)
    assert rows_of(server, hit)[:30] == rows
    assert places(server, [1] * 30 + [2]) == "D" * 31


@pytest.mark.parametrize("boundary", [LEAST_LOAD - 1, LEAST_LOAD, 17, 29])
def test_a_hit_may_end_anywhere_on_the_host(boundary):
    server = tiered(ratio=0.1)
    serve(server, [1] * 30)
    leave_the_device(server)
    hit = serve(server, [1] * boundary + [2] * 5)
    loaded = boundary if boundary >= LEAST_LOAD else 0
    assert hit.tail_replay.boundary == hit.host_hit_length == loaded
    assert places(server, [1] * 30) == "D" * boundary + "H" * (30 - boundary)


def test_a_hit_has_a_part_on_the_device_and_one_on_the_host():
    server = tiered(ratio=0.1)
    serve(server, [1] * 20 + [2] * 20)
    leave_the_device(server)
    serve(server, [1] * 20 + [3])
    assert places(server, [1] * 20 + [2] * 20) == "D" * 20 + "H" * 20
    hit = serve(server, [1] * 20 + [2] * 15 + [4])
    assert (hit.tail_replay.boundary, hit.host_hit_length) == (35, 15)


def test_what_the_host_drops_loses_its_rows():
    server = tiered(host_ratio=0.2)  # 20 tokens
    serve(server, [1] * 15)
    leave_the_device(server)
    assert server.cache.rows.pool.used_rows == 15
    serve(server, [2] * 15)
    assert places(server, [1] * 15) == "." * 15
    assert server.cache.rows.pool.used_rows == 15


def lose_rows(server: TieredScheduler, tokens: list[int], begin: int = 0) -> None:
    """As if other requests had needed the rows of tokens[begin:], which are whole nodes."""
    path = set(server.prefixes.path(tokens)[begin:])
    todo = [(node, 0) for node in server.cache.root_node.children.values()]
    for node, root in todo:
        end = server.prefixes.path(node.key, root)[-1]
        todo.extend((child, end) for child in node.children.values())
        if end in path:
            server.cache.rows._drop_rows(node)
    server.check(evicts_rows=True)


def two_parts(ratio: float) -> TieredScheduler:
    """20 tokens on the device without rows, 20 on the host with rows."""
    server = tiered(ratio=ratio)
    serve(server, [1] * 20 + [2] * 20)
    leave_the_device(server)
    serve(server, [1] * 20 + [3])
    lose_rows(server, [1] * 20)
    assert places(server, [1] * 20 + [2] * 20) == "d" * 20 + "H" * 20
    return server


def test_a_tail_on_the_host_serves_a_hit_whose_device_part_has_no_rows():
    hit = serve(two_parts(ratio=0.1), [1] * 20 + [2] * 20 + [4])
    assert (hit.tail_replay.boundary, hit.tail_replay.replayed, hit.tail_replay_shrunk) == (40, 4, None)


def test_a_hit_does_not_end_where_sglang_would_load_too_little():
    server = tiered(ratio=0.1)
    serve(server, [1] * 20 + [2] * 5 + [3])
    serve(server, [1] * 20 + [2] * 20)
    leave_the_device(server)
    serve(server, [1] * 20 + [4])
    lose_rows(server, [1] * 20 + [2] * 20, begin=25)
    assert places(server, [1] * 20 + [2] * 20) == "D" * 20 + "H" * 5 + "h" * 15
    hit = serve(server, [1] * 20 + [2] * 20 + [5])
    assert (hit.tail_replay.boundary, hit.tail_replay_shrunk) == (20, (40, 20, ROWS_MISSING))


def test_without_room_for_a_load_the_hit_needs_a_whole_tail_on_the_device(monkeypatch):
    server = two_parts(ratio=0.1)
    monkeypatch.setattr(server.cache, "load_back", lambda *args, **kwargs: False)
    server.loads = False
    req = serve(server, [1] * 20 + [2] * 20 + [4])
    assert (req.tail_replay.boundary, req.host_hit_length, req.tail_replay_shrunk) == (0, 0, (20, 0, ROWS_MISSING))
    assert places(server, [1] * 20 + [2] * 20) == "D" * 40


def test_a_copy_waits_for_the_pass_that_still_writes_the_last_token():
    server = tiered(overlap=True)
    server.arrive([1] * 20, 2)
    server.prefill(64, lambda: 1)
    server.decode(lambda: 1)
    server.decode(lambda: 1)  # the step too many is launched, then the result of the last one is processed
    assert not server.running and server.in_flight
    server.advance(forward=0, write=100, load=0)
    assert not server.in_flight
    server.drain()
    assert places(server, [1] * 22) == "D" * 22
    server.check()


def test_a_load_waits_for_the_pass_that_still_writes_a_freed_slot():
    """Two requests say the same, so that the second one's last slot is freed while it is written."""
    server = tiered(overlap=True)
    serve(server, [1] * 88)
    leave_the_device(server)
    for _ in range(2):
        finish(server)
        server.arrive([2] * 12, 3)
        server.prefill(64, lambda: 1)
        for _ in range(3):
            server.decode(lambda: 1)
    assert not server.running and server.in_flight
    server.early_loads = True
    hit = server.arrive([1] * 88 + [4], 1)  # evicts the rest and takes every freed slot
    written = set(server.in_flight)
    server.prefill(64, lambda: 1)
    assert hit.host_hit_length == 88 and written <= set(hit.prefix_indices.tolist())
    finish(server)


@pytest.mark.parametrize("end", ["abort", "retract"])
def test_a_request_may_end_while_its_kv_is_loaded(end):
    server = tiered(overlap=True)
    serve(server, [1] * 30)
    leave_the_device(server)
    req = server.arrive([1] * 30 + [2], 8)
    server.prefill(64, lambda: 1)
    assert req.host_hit_length == 30 and server.cache.ongoing_load_back
    if end == "abort":
        server.abort(0)
    server.decode(lambda: 1, retract=int(end == "retract"))
    finish(server)
    assert not server.cache.ongoing_load_back
    assert places(server, [1] * 30) == "D" * 30


def test_a_flush_while_copies_run_forgets_both_tiers():
    server = tiered()
    serve(server, [1] * 30)
    leave_the_device(server)
    server.arrive([2] * 40, 1)
    server.prefill(64, lambda: 1)
    server.drain()
    assert server.cache.ongoing_write_through
    server.flush()
    serve(server, [3] * 40)  # takes the same slots of both tiers
    assert places(server, [3] * 40) == "D" * 40


def test_kv_that_is_computed_again_carries_the_later_generation():
    server = tiered(ratio=0.1)
    serve(server, [1] * 40 + [2] * 5)
    leave_the_device(server)
    serve(server, [1] * 40 + [3])
    assert places(server, [1] * 40 + [2] * 5) == "D" * 40 + "H" * 5
    again = serve(server, [1] * 40 + [2] * 5 + [4])  # SGLang loads no 5 tokens
    assert (again.tail_replay.boundary, again.tail_replay.generation) == (40, 1)
    leave_the_device(server)
    assert serve(server, [1] * 40 + [2] * 5 + [5]).tail_replay.generation == 2


def test_the_planned_pool_is_the_one_that_sglang_makes():
    for ratio in (0.2, 1.0, 2.5):
        server = tiered(host_ratio=ratio)
        server_args = server._context(ratio, "write_through").server_args
        plan = host_tier.planned_pool(server_args, server.pool, free_bytes=1 << 30)
        made = server.controller.mem_pool_host
        assert plan.tokens == made.size - 1  # SGLang rounds up
        assert plan.bytes == plan.tokens * made.size_per_token


def test_a_planned_pool_that_does_not_fit_is_one_line():
    server = tiered()
    server_args = server._context(2.0, "write_through").server_args
    server_args.hicache_size = 3
    assert host_tier.planned_pool(server_args, server.pool, free_bytes=4 << 30).bytes == 3e9
    with pytest.raises(
        TailReplayError, match=r"^tail_replay: --hicache-size 3 takes 2\.8 GiB .* 1\.0 GiB are free"
    ) as error:
        host_tier.planned_pool(server_args, server.pool, free_bytes=1 << 30)
    assert "\n" not in str(error.value)
