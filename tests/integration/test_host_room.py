"""Which store gets how much of the host's memory."""

from types import SimpleNamespace

import pytest
import torch

import sglang_tailreplay
from sglang_tailreplay import host_room
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.errors import TailReplayError

MODEL = SimpleNamespace(hidden_size=64, row_groups=2)  # 256 bytes a row
STATES = SimpleNamespace(conv=[torch.zeros(3, 5, 8, 3)], temporal=torch.zeros(3, 5, 2, 4, 4))  # 672 bytes a request
RUNNER = SimpleNamespace(
    dtype=torch.bfloat16,
    token_to_kv_pool_allocator=SimpleNamespace(size=1000, get_kvcache=lambda: "kv"),
    req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=STATES)),
)


def divide(monkeypatch, free: int, host_tier: bool = False, **settings) -> host_room.HostRoom:
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: free)
    # In place of host_tier, which imports SGLang's memory pools: twice as many slots on the host, of 32 bytes each.
    planned = SimpleNamespace(planned_pool=lambda args, kv, free: SimpleNamespace(tokens=2000, bytes=2000 * 32))
    monkeypatch.setattr(sglang_tailreplay, "host_tier", planned, raising=False)
    args = SimpleNamespace(enable_hierarchical_cache=host_tier)
    return host_room.divide(TailReplayConfig(**settings), args, MODEL, RUNNER)


def test_rows_for_every_slot_where_they_fit(monkeypatch):
    room = divide(monkeypatch, 10**6)
    assert (room.rows, room.kv_slots, room.anchors) == (1000, 1000, 0) and room.shape.bytes == 256
    assert divide(monkeypatch, 10**5).rows == 10**5 // 2 // 256


def test_saved_states_come_before_rows(monkeypatch):
    room = divide(monkeypatch, 10**5, anchor_interval=100)
    assert room.anchors == 10 and room.rows == (10**5 - 10 * 672) // 2 // 256
    assert divide(monkeypatch, 10**5, anchor_interval=1).anchors == 10**5 // 8 // 672


def test_the_host_tier_comes_before_both_and_has_rows_of_its_own(monkeypatch):
    room = divide(monkeypatch, 10**5, host_tier=True, anchor_interval=500)
    assert room.kv_slots == 3000 and room.anchors == 6
    assert room.rows == (10**5 - 2000 * 32 - 6 * 672) // 2 // 256


def test_sums_of_log_gates_count_as_part_of_a_row(monkeypatch):
    assert host_room.value_heads(RUNNER) == (2, 3)
    room = divide(monkeypatch, 10**5, max_residual=0.5)
    assert room.shape.bytes == 256 + 16 and room.rows == 10**5 // 2 // 272


def test_rows_that_cannot_be_packed_name_the_flag(monkeypatch):
    monkeypatch.setattr(MODEL, "hidden_size", 72)
    with pytest.raises(TailReplayError, match="--tail-replay-row-dtype.*leave it out"):
        divide(monkeypatch, 10**6, row_dtype="fp8")
