"""Single stories that random work led to, told in order."""

import pytest
from checked_scheduler import CheckedScheduler

from sglang_tailreplay.config import TailReplayConfig


def scheduler(rows: int, ratio: float = 1.0, overlap: bool = False) -> CheckedScheduler:
    return CheckedScheduler(TailReplayConfig(ratio=ratio, min_tokens=4), rows, overlap)


def serve(server: CheckedScheduler, prompt: list[int], answer: int = 1):
    req = server.arrive(prompt, answer)
    while not server.idle:
        server.prefill(64, lambda: 1)
        server.decode(lambda: 1)
    return req


@pytest.mark.parametrize("free", [0, 1, 4, 7])
def test_rows_of_cached_tokens_make_room_whatever_is_free(free):
    server = scheduler(rows=8 + free)
    serve(server, [1] * 8)
    assert server.cache.rows.pool.free_rows == free
    serve(server, [2] * 8)
    assert [server.truth[prefix].has_row for prefix in server.prefixes.path([2] * 8)] == [True] * 8


def test_a_store_without_room_keeps_the_last_tokens():
    server = scheduler(rows=6, ratio=0.1)
    serve(server, [1] * 16)
    assert [server.truth[prefix].has_row for prefix in server.prefixes.path([1] * 16)] == [False] * 10 + [True] * 6
    assert len(serve(server, [1] * 16 + [2]).prefix_indices) == 17  # its own prompt, cached when it finished its prefill
    assert server.accounts["r1"].generation == 1
