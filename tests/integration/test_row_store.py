"""How many rows and state slots there are room for."""

import pytest
import torch

from sglang_tailreplay import row_store
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.row_store import GIB, RowShape, RowStore, choose_capacity, free_host_bytes
from sglang_tailreplay.state_slots import LEAST_SLOTS, MOST_SLOTS, STATE_SHARE, choose_state_slots

KIB = 1 << 10


def test_a_token_has_one_row_per_group():
    assert RowShape(7, 2560, torch.bfloat16).bytes == 7 * 2560 * 2
    assert RowShape(15, 5120, torch.float32).bytes == 15 * 5120 * 4


@pytest.mark.parametrize(
    "slots, free, host_gb, expected",
    [
        (1000, 4 * GIB, None, 1000),  # all fit
        (1000, 2000 * KIB, None, 1000),  # exactly half
        (1000, 1999 * KIB, None, 999),
        (10**9, 64 * GIB, None, 32 * GIB // KIB),  # half of what is free
        (1000, 2 * GIB, 1, 1000),
        (10**9, 64 * GIB, 1, GIB // KIB),
        (10**9, GIB, 1, GIB // KIB),  # all that is free
        (10**9, 64 * GIB, 0.5, GIB // 2 // KIB),
        (1000, GIB, 64, 1000),  # more than there is, but no more than the KV slots is taken
    ],
)
def test_capacity(slots, free, host_gb, expected):
    assert choose_capacity(KIB, slots, free, host_gb) == expected


@pytest.mark.parametrize("free", [GIB, 2 * GIB - 1])
def test_a_size_that_does_not_fit_names_its_flag(free):
    with pytest.raises(TailReplayError) as error:
        choose_capacity(KIB, 10**9, free, 2)
    message = str(error.value)
    assert "--tail-replay-host-gb 2 does not fit" in message and "GiB of host memory are free" in message
    assert "\n" not in message


@pytest.mark.parametrize("free, host_gb", [(2 * KIB - 1, None), (0, None), (GIB, 1e-9)])
def test_no_room_for_a_single_token(free, host_gb):
    with pytest.raises(TailReplayError, match="no room .* raise --tail-replay-host-gb"):
        choose_capacity(KIB, 1000, free, host_gb)


# ---- free memory ----


@pytest.fixture
def container(monkeypatch, tmp_path):
    """container(limit, used): the files of a cgroup; None for a file that is not there."""

    def make(limit, used):
        for name, value in (("memory.max", limit), ("memory.current", used)):
            if value is not None:
                (tmp_path / name).write_text(f"{value}\n")
        monkeypatch.setattr(row_store, "CGROUP", tmp_path)
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 8 * GIB}))

    return make


@pytest.mark.parametrize(
    "limit, used, free",
    [
        (4 * GIB, GIB, 3 * GIB),
        (64 * GIB, GIB, 8 * GIB),
        ("max", GIB, 8 * GIB),
        (4 * GIB, None, 8 * GIB),
        (None, None, 8 * GIB),
        (4 * GIB, 4 * GIB, 0),
    ],
)
def test_the_limit_of_the_container_counts(limit, used, free, container):
    container(limit, used)
    assert free_host_bytes() == free


def test_file_pages_of_the_container_are_free(container, tmp_path):
    container(4 * GIB, 3 * GIB)
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    assert free_host_bytes() == 2.5 * GIB


def test_the_first_version_of_cgroups_counts_too(container, tmp_path):
    container(None, None)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(5 * GIB))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(GIB))
    assert free_host_bytes() == 4 * GIB


# ---- the store ----


def test_the_rows_are_one_tensor():
    store = RowStore(RowShape(3, 8, torch.bfloat16), capacity=5, kv_slots=9)
    assert store.rows.shape == (3, 5, 8) and store.rows.dtype == torch.bfloat16 and store.capacity == 5
    assert store.rows.is_contiguous() and store.rows.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="gigabytes of pinned memory are not filled")
def test_a_row_that_was_never_written_is_no_number():
    assert RowStore(RowShape(2, 8, torch.float32), 4, 4).rows.isnan().all()


def test_its_size_is_reported(caplog):
    with caplog.at_level("INFO"):
        RowStore(RowShape(2, 8, torch.float32), capacity=4, kv_slots=9)
    assert "for 4 tokens (9 KV slots), 64 bytes a token" in caplog.text


# ---- state slots ----


@pytest.mark.parametrize("requests", [1, 5, 1000])
def test_one_state_slot_per_running_request(requests):
    assert choose_state_slots(requests, 2000 * KIB, KIB) == requests


@pytest.mark.parametrize("rest, slots", [(2000 * KIB, 1000), (100 * KIB, 50), (KIB, 1), (0, 1)])
def test_states_leave_half_of_the_memory_to_kv(rest, slots):
    assert choose_state_slots(1000, rest, KIB) == slots


@pytest.mark.parametrize(
    "rest, state, expected",
    [
        (100 * GIB, 100 * (1 << 20), int(100 * GIB * STATE_SHARE) // (100 * (1 << 20))),
        (100 * GIB, KIB, MOST_SLOTS),
        (GIB, GIB, LEAST_SLOTS),
        (0, GIB, LEAST_SLOTS),
    ],
)
def test_state_slots_take_their_share_within_bounds(rest, state, expected):
    assert LEAST_SLOTS <= expected <= MOST_SLOTS
    assert choose_state_slots(None, rest, state) == expected
