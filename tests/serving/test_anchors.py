"""Anchors through the server: with a state saved nearby, a hit at 5 % is exact. Float32 on a model that remembers.

The same server verifies every hit in idle time, which has exact and approximate ones to tell apart here, and builds
nothing on approximate ones.
"""

import time

import pytest

INTERVAL, CHUNK, PREFIX = 64, 256, 600


@pytest.fixture(scope="module")
def anchored(serve_tiny):
    flags = ("--tail-replay-ratio", "0.05", "--tail-replay-anchor-interval", str(INTERVAL))
    flags += ("--tail-replay-verify-fraction", "1", "--tail-replay-max-generation", "0")
    with serve_tiny(*flags, "--enable-metrics", "--enable-cache-report") as server:
        yield server


@pytest.fixture(scope="module")
def prefix(anchored, prompt):
    """A cached prompt with anchors at the ends of its chunks: 256, 512 and 600."""
    ids = prompt(PREFIX)
    anchored.generate(ids, 1)
    return ids


def leave(prompt, ids, boundary):
    """A prompt that leaves ids at the boundary and nowhere later."""
    fresh = prompt(12)
    if boundary < len(ids):
        fresh[0] = ids[boundary] ^ 1 or 2
    return ids[:boundary] + fresh


def check(anchored, cold, ids, boundary, anchor):
    answer = anchored.generate(ids, 8)
    assert (answer.cached_tokens, answer.replayed) == (boundary, boundary - anchor)
    assert answer.meta["cached_tokens_details"]["tail_replay_anchored"] == 1
    assert answer.generation == 0, "an exact hit must not count as an approximation"
    assert answer.tokens == cold.generate(ids, 8).tokens


@pytest.mark.parametrize("gap", [0, 1, 3, 64, 100, 2 * INTERVAL])
def test_a_hit_behind_an_anchor_is_exact(anchored, cold, prompt, prefix, gap):
    check(anchored, cold, leave(prompt, prefix, CHUNK + gap), CHUNK + gap, anchor=CHUNK)


def test_at_the_very_end_of_a_prompt(anchored, cold, prompt, prefix):
    check(anchored, cold, prefix + prompt(5), PREFIX, anchor=PREFIX)


def test_without_an_anchor_in_reach_it_is_an_approximation(anchored, cold, prompt, prefix):
    """And on this model it shows, or the tests above would show nothing."""
    differs = 0
    for boundary in (470, 480, 490, 500):
        ids = leave(prompt, prefix, boundary)
        answer = anchored.generate(ids, 8)
        assert (answer.cached_tokens, answer.replayed, answer.generation) == (boundary, 64, 1)
        assert "tail_replay_anchored" not in answer.meta["cached_tokens_details"]
        differs += answer.tokens != cold.generate(ids, 8).tokens
    assert differs


def test_inside_generated_text(anchored, cold, prompt):
    """Anchors are taken while decoding, too: the prompt ends at 70, the next one comes at 134."""
    ids = prompt(70)
    text = ids + anchored.generate(ids, 100).tokens
    check(anchored, cold, leave(prompt, text, 150), 150, anchor=134)


def test_turns_of_a_chat_stay_exact(anchored, cold, prompt):
    history = prompt(80)
    for turn in range(4):
        answer = anchored.generate(history, 70)
        assert answer.tokens == cold.generate(history, 70).tokens, turn
        assert not turn or (answer.generation == 0 and answer.cached_tokens > 80)
        history = history + answer.tokens[:66] + prompt(9)


def test_metrics_tell_them_apart(anchored, prefix, prompt):
    anchored.generate(leave(prompt, prefix, CHUNK + 9), 1)
    assert 'kind="anchored"' in anchored.open("/metrics").decode()


def test_nothing_is_built_on_an_approximate_replay(anchored, cold, prompt, prefix):
    def cut_hits():
        found = [s for s in anchored.metric_samples() if s.name.endswith("shrunk_hits_total")]
        return sum(s.value for s in found if s.labels["reason"] == "generation")

    branch = leave(prompt, prefix, 470) + prompt(60)
    assert anchored.generate(branch, 1).generation == 1
    before = cut_hits()
    ids = branch + prompt(5)
    answer = anchored.generate(ids, 1)  # all of the branch is in the cache
    assert (answer.cached_tokens, answer.replayed, answer.generation) == (470, 64, 1)
    assert cut_hits() == before + 1
    exact = anchored.generate(ids, 8, custom_params={"tail_replay_ratio": 1.0})
    assert (exact.cached_tokens, exact.generation) == (470, 0)
    assert exact.tokens == cold.generate(ids, 8).tokens


def test_verified_hits_tell_exact_from_approximate_ones(anchored, cold, prompt):
    anchored.flush()
    ids = prompt(PREFIX)
    anchored.generate(ids, 1)
    count, agreeing, nats = anchored.verified()
    exact = [leave(prompt, ids, boundary) for boundary in (3, CHUNK, 390, PREFIX - 1)]
    for branch in exact:
        assert anchored.generate(branch, 2, custom_params={"tail_replay_ratio": 1.0}).generation == 0
    after = anchored.verified()
    assert (after[0] - count, after[1] - agreeing) == (4, 4) and after[2] - nats < 1e-5
    for boundary in (470, 480, 490, 500):
        assert anchored.generate(leave(prompt, ids, boundary), 2).generation == 1
    last = anchored.verified()
    assert last[0] - after[0] == 4 and last[2] - after[2] > 0.01
    assert f"tail_replay: verified {last[0]:.0f} hits so far: the first token agrees in {last[1]:.0f}" in anchored.log()
    # Nothing of it is left: hits are where they were, and what a prefill outside of the cache computed is not there.
    again = leave(prompt, ids, 555)
    answer = anchored.generate(again, 8, custom_params={"tail_replay_ratio": 1.0})
    assert answer.cached_tokens == 555 and answer.tokens == cold.generate(again, 8).tokens
    time.sleep(1.5)  # idle: the leak checks run
    anchored.check_alive()
