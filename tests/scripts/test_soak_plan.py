"""What scripts/soak sends: the same for the same seed, within the limits, and every kind of it."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "lib"))

from soak.cli import options_of, server_flags  # noqa: E402
from soak.plan import ENDS, MALFORMED, REFUSED, Flush, Kind, Limits, Planner, malformed, prompt_of  # noqa: E402

LIMITS = Limits(max_prompt=200, max_new=32, concurrency=6, running=4, context=300, vocabulary=(2, 1000))


def rounds(seed, n, limits=LIMITS):
    planner = Planner(seed, limits)
    return [planner.next_round() for _ in range(n)]


def requests(planned):
    return [r for one in planned for r in one.requests]


def resolve(planned, seed=3, limits=LIMITS):
    """step -> prompt, with answers that say whose they are."""
    prompts, texts = {}, {}
    for one in planned:
        for r in one.requests:
            prompts[r.step] = prompt_of(r, seed, texts, limits.vocabulary)
        for r in one.requests:
            texts[r.step] = prompts[r.step] + ([10_000 + r.step] * r.max_new if r.kind in ENDS else [])
    return prompts


@given(st.integers(0, 2**32), st.integers(16, 400), st.integers(2, 60), st.integers(1, 9))
def test_whatever_the_seed_prompts_fit_and_lengths_are_what_was_planned(seed, max_prompt, max_new, concurrency):
    limits = Limits(max_prompt, max_new, concurrency, 4, max_prompt + max_new + 1, (2, 1000))
    planned = rounds(seed, 20, limits)
    prompts = resolve(planned, seed, limits)
    for r in requests(planned):
        assert len(prompts[r.step]) == r.prompt_length >= 1
        assert 1 <= r.max_new <= max_new
        assert 0 < r.ratio <= 1
        assert (r.prompt_length > limits.context) == (r.kind is Kind.TOO_LONG)
        assert r.prompt_length <= max_prompt or r.kind is Kind.TOO_LONG
        assert 10_000 not in prompts[r.step] or r.base is not None


def test_one_seed_gives_one_load_and_another_seed_another():
    assert rounds(5, 40) == rounds(5, 40)
    assert rounds(5, 40) != rounds(6, 40)
    assert resolve(rounds(5, 9), seed=5) == resolve(rounds(5, 9), seed=5)


def test_every_kind_flush_and_fault_comes_up():
    planned = rounds(1, 400)
    kinds = Counter(r.kind for r in requests(planned))
    assert set(kinds) == set(Kind) and min(kinds.values()) >= 5
    assert {one.flush for one in planned} == set(Flush)
    assert {r.fault for r in requests(planned) if r.kind is Kind.MALFORMED} == set(range(len(MALFORMED)))
    bursts = [one for one in planned if one.requests[0].kind is Kind.BURST]
    assert bursts and all(len(one.requests) > LIMITS.running for one in bursts)


def test_requests_build_on_texts_that_are_over():
    over = {}
    for one in rounds(2, 80):
        for r in one.requests:
            if r.base is not None:
                assert 1 <= r.kept <= over[r.base]
        over |= {r.step: r.reusable for r in one.requests if r.kind not in REFUSED}


def test_only_exact_answers_in_full_are_compared():
    planned = rounds(4, 60)
    by_step = {r.step: r for r in requests(planned)}
    checked = [by_step[step] for one in planned for step in one.checked]
    assert len(checked) > 50
    assert all(r.ratio == 1 and r.kind in ENDS for r in checked)
    assert any(r.ratio < 1 for r in by_step.values())


def test_boundaries_lie_inside_answers_too():
    prompts = resolve(rounds(7, 80))
    assert sum(any(token >= 10_000 for token in prompt) for prompt in prompts.values()) > 30


@pytest.mark.parametrize("fault", range(len(MALFORMED)))
def test_a_malformed_body_has_one_fault(fault):
    good = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    bad = malformed(good, fault)
    assert bad != good
    assert sum(bad.get(key) != value for key, value in good.items()) == 1


@pytest.mark.parametrize("limits", [LIMITS._replace(max_prompt=3), LIMITS._replace(concurrency=0)])
def test_limits_too_small_for_a_load_are_refused(limits):
    with pytest.raises(ValueError, match="at least 16 tokens"):
        Planner(0, limits)


def test_flags_after_the_dashes_go_to_the_server_and_win():
    options, flags = options_of(["--model-path", "m", "--max-prompt", "900", "--", "--max-total-tokens", "77"])
    assert flags == ["--max-total-tokens", "77"]
    chosen = server_flags(options, flags)
    assert chosen.count("--max-total-tokens") == 1 and chosen[-1] == "77"
    assert int(chosen[chosen.index("--context-length") + 1]) > 900


@pytest.mark.parametrize("words", ["", "--url u --kill", "--url u -- --x", "--url u --model-path m"])
def test_options_that_contradict_each_other_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        options_of(words.split())
    assert "error" in capsys.readouterr().err
