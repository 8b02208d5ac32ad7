"""KV that was evicted to the host and comes back for a hit: with r = 1 in float32 the tokens are those of no cache."""

import pytest

DEVICE_TOKENS = 1500
SMALL = ("--max-total-tokens", str(DEVICE_TOKENS), "--context-length", "1400", "--chunked-prefill-size", "256")
SMALL += ("--max-running-requests", "4", "--mem-fraction-static", "0.2", "--sleep-on-idle")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--tail-replay-ratio", "1.0", "--enable-metrics")


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        "write_through",
        pytest.param("write_through_selective", marks=SLOW),
        pytest.param("write_back", marks=SLOW),
    ],
)
def tiered(request, serve_tiny):
    with serve_tiny(*HOST, "--hicache-write-policy", request.param, small=SMALL) as server:
        yield server


def push_out(server, prompt):
    """Other prompts, each sent twice so that every policy copies them, take the whole device, and some more."""
    for _ in range(4):
        ids = prompt(600)
        for _ in range(2):
            server.generate(ids, 1)


@pytest.mark.parametrize("boundary", [3, 255, 256, 400, 599])
def test_a_prompt_that_was_evicted_to_the_host_is_hit_at_any_token(tiered, cold, prompt, boundary):
    ids = prompt(600)
    for _ in range(2):
        tiered.generate(ids, 1)
    push_out(tiered, prompt)
    fork = ids[:boundary] + [ids[boundary] ^ 1 or 2] + prompt(20)
    answer = tiered.generate(fork, 8)
    assert answer.tokens == cold.generate(fork, 8).tokens
    if boundary < 10:  # SGLang does not load so few
        assert answer.cached_tokens == 0
    else:
        assert answer.cached_tokens == answer.meta["cached_tokens_details"]["host"] == boundary
        assert (answer.matched, answer.replayed, answer.generation) == (boundary, boundary, 0)
