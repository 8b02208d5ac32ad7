"""Every fault that scripts/soak is there to find is found, and a faultless answer is not accused."""

import dataclasses
import math
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "lib"))

from soak.judge import (  # noqa: E402
    Outcome,
    Sample,
    Sent,
    Tally,
    Text,
    comparable,
    compare,
    growth,
    judge,
    possible_hits,
)
from soak.plan import Kind, Request  # noqa: E402

TURN = Request(step=5, kind=Kind.TURN, base=1, kept=3, fresh=2, max_new=2, ratio=1.0)
PROMPT = [4, 5, 6, 7, 8]
GOOD = Outcome(
    status=200,
    seconds=0.1,
    tokens=(9, 8),
    cached=3,
    generation=0,
    finish="length",
    top=({9: -0.5, 3: -2.0}, {8: -0.25, 9: -4.0}),
    chosen=(-0.5, -0.25),
)
COLD = dataclasses.replace(GOOD, cached=0, generation=None)


def whats(failures):
    return [failure.what for failure in failures]


def changed(outcome=GOOD, **fields):
    return dataclasses.replace(outcome, **fields)


def judged(outcome, request=TURN, possible=3):
    return whats(judge(request, PROMPT, outcome, possible))


def test_a_good_answer_has_no_failure():
    assert judged(GOOD) == []
    assert whats(compare(TURN, PROMPT, GOOD, COLD, None)) == []
    assert whats(compare(TURN, PROMPT, GOOD, COLD, 1e-6)) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"status": 500}, ["5xx"]),
        ({"status": 503}, ["5xx"]),
        ({"status": 400}, ["refused"]),
        ({"status": None}, ["no-answer"]),
        ({"cached": 4}, ["cached-too-much"]),
        ({"tokens": (9,)}, ["short-answer"]),
        ({"finish": "abort"}, ["short-answer"]),
        ({"chosen": (-0.5, math.nan)}, ["nan"]),
        ({"cached": 0, "generation": 1}, ["generation"]),
        ({"cached": 0, "generation": 1, "retractions": 1}, []),  # what it found afterwards is not counted
    ],
)
def test_a_fault_of_one_answer_is_found(fields, what):
    assert judged(changed(**fields)) == what


@pytest.mark.parametrize(("status", "message", "failures"), [
    (400, "bad ratio", []), (422, "no", []), (400, "", 1), (500, "oh", 1), (200, "", 1), (None, "gone", 1),
])  # fmt: skip
def test_what_must_be_refused_is_refused_with_a_message(status, message, failures):
    request = dataclasses.replace(TURN, kind=Kind.MALFORMED)
    found = judged(Outcome(status, 0.1, message), request)
    assert found == (["not-refused"] if failures else [])


def test_a_cut_stream_need_not_end():
    assert judged(Outcome(None, 0.1), dataclasses.replace(TURN, kind=Kind.DISCONNECT)) == []
    aborted = Outcome(200, 0.1, tokens=(9,), finish="abort")
    assert judged(aborted, dataclasses.replace(TURN, kind=Kind.ABORT)) == []
    assert judged(Outcome(500, 0.1, "oh"), dataclasses.replace(TURN, kind=Kind.DISCONNECT)) == ["5xx"]


def test_a_wrong_token_is_found_and_a_tie_is_not():
    wrong = changed(tokens=(3, 8))
    assert whats(compare(TURN, PROMPT, wrong, COLD, None)) == ["wrong-token"]
    near = ({9: -0.5, 3: -0.5001}, {8: -0.25, 9: -4.0})
    assert whats(compare(TURN, PROMPT, changed(wrong, top=near), changed(COLD, top=near), None)) == []
    # Equally good in the accused answer only: the cold one knows better.
    assert whats(compare(TURN, PROMPT, changed(wrong, top=near), COLD, None)) == ["wrong-token"]


@pytest.mark.parametrize(("top", "what"), [
    ({9: -0.5, 3: -2.05}, []),
    ({9: -0.5, 3: -2.2}, ["wrong-logprob"]),
    ({9: -0.5, 4: -1.0}, ["wrong-logprob"]),  # the cold answer lists nothing as likely as that
    ({9: math.nan, 3: -2.0}, ["nan"]),
    ({}, ["nan"]),
])  # fmt: skip
def test_log_probabilities_are_held_to_the_bound(top, what):
    hit = changed(top=(top, GOOD.top[1]))
    if not top:
        hit = changed(top=None)
    assert whats(compare(TURN, PROMPT, hit, COLD, 0.1)) == what


def test_log_probabilities_that_sglang_loses_in_a_retraction_are_no_failure_and_prove_nothing():
    lost = changed(top=GOOD.top[1:], retractions=1)
    assert lost.first_lost and not comparable(TURN, lost)
    tally = Tally()
    tally.count_comparison(GOOD, changed(COLD, top=COLD.top[1:], retractions=1))
    assert tally.compared == 0
    assert whats(compare(TURN, PROMPT, GOOD, changed(COLD, top=COLD.top[1:], retractions=1), None)) == []
    assert whats(compare(TURN, PROMPT, changed(tokens=(9,), top=()), COLD, None)) == ["nan"]  # it was not retracted


def test_a_missing_log_probability_is_told_with_what_there_is():
    (failure,) = compare(TURN, PROMPT, GOOD, changed(COLD, top=()), None)
    assert "(cold: of 2 tokens 0 log-probabilities, first {}" in failure.text and "retracted 0 times" in failure.text


def test_a_cold_answer_that_was_none_is_found():
    assert whats(compare(TURN, PROMPT, GOOD, changed(COLD, cached=2), None)) == ["not-isolated"]
    assert whats(compare(TURN, PROMPT, GOOD, Outcome(500, 1.0, "oh"), None)) == ["cold-failed"]


def test_approximate_answers_are_not_compared():
    assert comparable(TURN, GOOD)
    assert not comparable(dataclasses.replace(TURN, ratio=0.3), GOOD)
    assert not comparable(TURN, changed(generation=1))
    assert not comparable(TURN, changed(finish="abort"))


def test_a_failure_tells_step_and_prompt():
    (failure,) = judge(TURN, PROMPT, changed(status=500), 3)
    assert (failure.step, failure.prompt) == (5, (4, 5, 6, 7, 8))


def plain_longest(prompt, texts):
    return max(len(os.path.commonprefix([prompt, text])) for text in texts)


@given(st.integers(0, 2**32))
def test_longest_prefix_is_that_of_a_plain_search(seed):
    draw = random.Random(seed)
    texts = [[draw.choice((1, 2, 255, 256, 70_000)) for _ in range(draw.randrange(1, 9))] for _ in range(20)]
    sent = Sent()
    for text in texts[:15]:
        sent.add(text)
    for prompt in texts:
        assert sent.longest(prompt) == plain_longest(prompt, texts[:15])
    sent.clear()
    assert sent.longest(texts[0]) == 0


def test_what_a_cache_can_have():
    sent = Sent()
    sent.add([1, 2, 3, 4])
    sent.add([7, 7], unseen=2)  # cut after an unknown number of tokens
    round_ = [
        Text([1, 2, 9], [], 0),
        Text([1, 2, 3, 4], [], 0),  # a repeat: its last token is computed
        Text([7, 7, 5, 5, 5], [], 0),
        Text([6, 6, 6], [8, 8], 0),
        Text([6, 6, 6, 8, 3], [], 0),  # builds on the one before, in the same round
        Text([5, 5, 5], [], 0, rematched=True),  # was retracted: finds what it computed itself
    ]
    assert possible_hits(sent, round_) == [2, 3, 4, 2, 4, 2]


def samples(*mib, processes=4):
    return [Sample(float(i), processes, m * 2**20) for i, m in enumerate(mib)]


def test_growth_of_the_second_half_is_found_and_that_of_the_first_is_not():
    warm_up = samples(*range(100, 900, 100), *[900] * 8)
    assert list(growth(warm_up, 50 * 2**20)) == []
    leak = samples(*[900] * 8, *range(900, 1700, 100))
    assert whats(growth(leak, 50 * 2**20)) == ["memory-growth"]
    assert list(growth(leak, 2000 * 2**20)) == []
    spike = samples(*[900] * 13, 5000, 900, 900, 900)
    assert list(growth(spike, 50 * 2**20)) == []


def test_a_process_more_is_found():
    more = [*samples(*[900] * 12), *(Sample(12.0 + i, 5, 900 * 2**20) for i in range(4))]
    assert whats(growth(more, 2**20)) == ["process-leak"]
