"""Anchors through the server: with a state saved nearby, a hit at 5 % is exact. Float32 on a model that remembers.

The same server verifies every hit in idle time, which has exact and approximate ones to tell apart here, and builds
nothing on approximate ones.
"""

import random
import time

import pytest

INTERVAL, PREFIX = 128, 600  # passes of 256 tokens


@pytest.fixture(scope="module")
def anchored(serve_tiny):
    flags = ("--tail-replay-ratio", "0.05", "--tail-replay-anchor-interval", str(INTERVAL))
    flags += ("--tail-replay-verify-fraction", "1", "--tail-replay-max-generation", "0")
    with serve_tiny(*flags, "--enable-metrics", "--enable-cache-report") as server:
        yield server


@pytest.fixture(scope="module")
def prefix(anchored, prompt):
    """A cached prompt with anchors inside of its passes and at their ends: 128, 256, 384 and 512."""
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


@pytest.mark.parametrize("gap", [0, 1, 3, 64, 100, 127])
@pytest.mark.parametrize("anchor", [INTERVAL, 2 * INTERVAL])
def test_a_hit_behind_an_anchor_is_exact(anchored, cold, prompt, prefix, anchor, gap):
    check(anchored, cold, leave(prompt, prefix, anchor + gap), anchor + gap, anchor)


def test_a_hit_at_any_token_is_exact(anchored, cold, prompt):
    """Prompts of random lengths that leave each other at random tokens, so that passes begin anywhere."""
    cuts = random.Random(5)
    texts = [prompt(500)]
    anchored.generate(texts[0], 1)
    for _ in range(12):
        cut = cuts.randrange(INTERVAL, 500)
        text = leave(prompt, cuts.choice(texts)[:500], cut)
        text = text + prompt(cuts.randrange(500 - len(text), 560 - len(text)))
        answer = anchored.generate(text, 8)
        assert answer.cached_tokens >= cut and answer.generation == 0
        assert answer.tokens == cold.generate(text, 8).tokens, f"cut at {cut}"
        texts.append(text)


def without_anchors(anchored, prompt):
    """A cached prompt whose anchors are gone. The store has a place per 128 KV slots.

    What pushes them out takes little KV, but is worth as much: each of these leaves an anchor at its end, an interval
    behind the start, and is about as long as the one that all of them begin with.
    """
    ids, common = prompt(PREFIX), prompt(INTERVAL - 8)
    anchored.generate(ids, 1)
    anchored.generate(common, 1)
    for _ in range(3):
        anchored.generate_many([common[:-1] + prompt(4) for _ in range(32)], 1)
    return ids


def test_when_its_anchors_were_evicted_a_hit_is_an_approximation(anchored, cold, prompt):
    """And on this model it shows, or the tests above would show nothing."""
    ids, differs = without_anchors(anchored, prompt), 0
    for boundary in (470, 490, 510, 550):
        text = leave(prompt, ids, boundary)
        answer = anchored.generate(text, 8)
        assert (answer.cached_tokens, answer.replayed, answer.generation) == (boundary, 64, 1)
        assert "tail_replay_anchored" not in answer.meta["cached_tokens_details"]
        differs += answer.tokens != cold.generate(text, 8).tokens
    assert differs


def test_inside_generated_text(anchored, cold, prompt):
    """Anchors are taken while decoding, too."""
    ids = prompt(70)
    text = ids + anchored.generate(ids, 100).tokens
    check(anchored, cold, leave(prompt, text, 150), 150, anchor=INTERVAL)


def test_at_the_end_of_an_answer(anchored, cold, prompt):
    """With overlap scheduling the tree may have the last token or not; the state is that of all that it has."""
    ids = prompt(70)
    text = ids + anchored.generate(ids, 100).tokens + prompt(9)
    answer = anchored.generate(text, 8)
    assert answer.cached_tokens in (169, 170) and (answer.replayed, answer.generation) == (0, 0)
    assert answer.tokens == cold.generate(text, 8).tokens


def test_requests_side_by_side_are_exact(anchored, cold, prompt):
    """Several requests in a pass, with hits and without, each with anchors of its own."""
    shared = prompt(300)
    anchored.generate(shared, 1)
    texts = [leave(prompt, shared, cut) + prompt(more) for cut, more in ((150, 120), (290, 5), (201, 80), (1, 200))]
    for _ in range(2):
        answers = anchored.generate_many(texts, 8)
        for text, answer in zip(texts, answers, strict=True):
            assert answer.generation in (0, None) and answer.tokens == cold.generate(text, 8).tokens


def test_turns_of_a_chat_stay_exact(anchored, cold, prompt):
    history = prompt(80)
    for turn in range(4):
        answer = anchored.generate(history, 70)
        assert answer.tokens == cold.generate(history, 70).tokens, turn
        assert not turn or (answer.generation == 0 and answer.cached_tokens > 80)
        history = history + answer.tokens[:66] + prompt(9)


def test_metrics_tell_them_apart(anchored, prefix, prompt):
    anchored.generate(leave(prompt, prefix, INTERVAL + 9), 1)
    assert 'kind="anchored"' in anchored.open("/metrics").decode()


def test_nothing_is_built_on_an_approximate_replay(anchored, cold, prompt):
    def cut_hits():
        found = [s for s in anchored.metric_samples() if s.name.endswith("shrunk_hits_total")]
        return sum(s.value for s in found if s.labels["reason"] == "generation")

    branch = leave(prompt, without_anchors(anchored, prompt), 470) + prompt(60)
    assert anchored.generate(branch, 1).generation == 1
    before = cut_hits()
    ids = branch + prompt(5)
    answer = anchored.generate(ids, 1)  # all of the branch is in the cache
    assert (answer.cached_tokens, answer.replayed, answer.generation) == (470, 64, 1)
    assert cut_hits() == before + 1
    # Nor does it go on with what the tree has of the tokens that it computed itself.
    for end in (0, 1, 5):
        text = branch + prompt(end)
        exact = anchored.generate(text, 8, custom_params={"tail_replay_ratio": 1.0})
        assert (exact.cached_tokens, exact.generation) == (470, 0)
        assert exact.tokens == cold.generate(text, 8).tokens


def test_verified_hits_tell_exact_from_approximate_ones(anchored, cold, prompt):
    anchored.flush()
    ids = without_anchors(anchored, prompt)
    count, agreeing, nats = anchored.verified()
    exact = [leave(prompt, ids, boundary) for boundary in (3, 256, 390, PREFIX - 1)]
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
