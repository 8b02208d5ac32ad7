"""r = 1 in float32: whatever was cached, wherever the boundary lies, the tokens are those of a server without cache."""

import random
import time

import pytest

CHUNK = 256  # --chunked-prefill-size of the servers
PREFIX = 600


@pytest.fixture(scope="module")
def prefix(exact, prompt):
    """A cached prompt, prefilled in three chunks."""
    ids = prompt(PREFIX)
    exact.generate(ids, 1)
    return ids


def same_as_cold(exact, cold, ids, cached, tokens=8):
    answer = exact.generate(ids, tokens)
    assert answer.cached_tokens == cached
    assert answer.tokens == cold.generate(ids, tokens).tokens
    return answer


@pytest.mark.parametrize("boundary", [1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 400, 2 * CHUNK, PREFIX - 1])
def test_any_boundary_is_a_whole_hit(exact, cold, prompt, prefix, boundary):
    fresh = prompt(12)
    fresh[0] = prefix[boundary] ^ 1 or 2  # diverges here and nowhere later
    answer = same_as_cold(exact, cold, prefix[:boundary] + fresh, cached=boundary)
    assert (answer.matched, answer.replayed, answer.generation) == (boundary, boundary, 0)


def test_suffix_of_one_token(exact, cold, prefix):
    same_as_cold(exact, cold, prefix[:300] + [5], cached=300)


def test_same_prompt_three_times_leaves_one_token(exact, cold, prompt):
    ids = prompt(321)
    same_as_cold(exact, cold, ids, cached=0)
    for _ in range(2):
        same_as_cold(exact, cold, ids, cached=len(ids) - 1)


@pytest.mark.parametrize("kept", [1, 7, 23, 24])
def test_boundary_inside_generated_text(exact, cold, prompt, kept):
    ids = prompt(90)
    generated = exact.generate(ids, 24).tokens
    # The last token counts too: the step after the last one has written its KV and its row.
    same_as_cold(exact, cold, [*ids, *generated[:kept], 3, 4, 5], cached=len(ids) + kept)


def test_five_turns_whose_answers_are_shortened(exact, cold, prompt):
    """A chat template that drops the thinking: each turn's prompt leaves the cached text inside the last answer."""
    history, expected = prompt(120), 0
    for turn in range(5):
        answer = exact.generate(history, 20)
        assert answer.cached_tokens == expected
        assert answer.tokens == cold.generate(history, 20).tokens
        kept = 20 - 3 * turn
        expected = len(history) + kept
        history = [*history, *answer.tokens[:kept], *prompt(15)]


@pytest.mark.parametrize("suffix", [40, 376, 700])
def test_long_suffixes_hit_as_well(exact, cold, prompt, prefix, suffix):
    same_as_cold(exact, cold, prefix + prompt(suffix), cached=PREFIX)


def test_concurrent_requests_share_one_prefix(exact, cold, prompt, prefix):
    prompts = [prefix + prompt(30 + i) for i in range(8)]
    answers = exact.generate_many(prompts, 8, concurrency=8)
    # One more where a suffix happens to begin like one that is cached.
    assert all(a.cached_tokens in (PREFIX, PREFIX + 1) for a in answers)
    assert [a.tokens for a in answers] == [a.tokens for a in cold.generate_many(prompts, 8)]


def test_mixed_batch_of_cold_and_cached_requests(exact, cold, prompt, prefix):
    prompts = [prompt(500) if i % 2 else prefix[: 100 * i + 50] + prompt(40) for i in range(6)]
    answers = exact.generate_many(prompts, 12, concurrency=6)
    assert [a.tokens for a in answers] == [a.tokens for a in cold.generate_many(prompts, 12)]


def test_an_early_token_matters(cold, prompt):
    """The control of this whole file: on this model a wrong state would show."""
    ids = prompt(300)
    changed = [*ids[:3], ids[3] ^ 1 or 2, *ids[4:]]
    assert cold.generate(ids, 8).tokens != cold.generate(changed, 8).tokens


def prefix_tree(seed: int, requests: int) -> list[list[int]]:
    """Prompts that share roots and branches."""
    rnd = random.Random(seed)

    def ids(low, high):
        return [rnd.randrange(2, 1000) for _ in range(rnd.randrange(low, high))]

    roots = [ids(64, 300) for _ in range(6)]
    branches = [rnd.choice(roots) + ids(10, 150) for _ in range(12)]
    return [rnd.choice(branches) + ids(1, 40) for _ in range(requests)]


@pytest.fixture(scope="module")
def tree_answers(cold):
    """80 prompts of a prefix tree and what a server without a cache answers."""
    prompts = prefix_tree(seed=7, requests=80)
    return prompts, [a.tokens for a in cold.generate_many(prompts, 12, concurrency=6)]


POOL = ("--max-total-tokens", "3000", "--context-length", "2048", "--chunked-prefill-size", "256")
POOL += ("--max-running-requests", "8", "--mem-fraction-static", "0.2", "--sleep-on-idle")


RETRACT = {"SGLANG_TEST_RETRACT": "1"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        pytest.param(
            ("--enable-mixed-chunk", "--tail-replay-no-skip", "--tail-replay-max-residual", "0.5"),
            RETRACT,
            id="eviction-mixed-retraction",
        ),
        pytest.param((), {}, id="eviction", marks=SLOW),
        pytest.param(("--enable-mixed-chunk", "--tail-replay-no-skip"), {}, id="mixed-chunk", marks=SLOW),
        pytest.param((), RETRACT, id="retraction", marks=SLOW),
    ],
)
def test_prefix_tree_under_load(serve_tiny, tree_answers, flags, env):
    with serve_tiny("--tail-replay-ratio", "1.0", *flags, small=POOL, **env) as server:
        answers_are_cold_ones(server, *tree_answers)


def test_prefix_tree_with_few_rows(few_rows, tree_answers):
    answers_are_cold_ones(few_rows, *tree_answers, hits=20)  # which ones find their rows depends on who came first


def answers_are_cold_ones(server, prompts, expected, hits=40):
    answers = server.generate_many(prompts, 12, concurrency=6)
    assert [a.tokens for a in answers] == expected
    assert sum(a.cached_tokens > 0 for a in answers) > hits
    # Idle from here on: SGLang's leak check and ours run, and take the server down if something does not add up.
    server.flush()
    time.sleep(1.5)
    server.check_alive()


def test_zero_mode_is_the_control(serve_tiny, tree_answers):
    """The same load with states left at zero: if this agreed too, the tests above would prove nothing."""
    prompts, expected = tree_answers
    with serve_tiny("--tail-replay-mode", "zero", small=POOL) as server:
        answers = server.generate_many(prompts, 12, concurrency=6)
        agreeing = sum(a.tokens == tokens for a, tokens in zip(answers, expected, strict=True))
        assert agreeing < 60
        hits = [a for a in answers if a.cached_tokens]
        assert hits and all(a.replayed == 0 and a.generation > 0 for a in hits)
