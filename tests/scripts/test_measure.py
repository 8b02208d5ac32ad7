"""Plans, arithmetic and report of scripts/gpu_check; no engine runs here."""

import json
import math
import subprocess
import sys
from pathlib import Path

import correctness
import gpu_check
import measure
import prompts
import pytest
import report
import tables
from measure import EnginePlan, Sizes
from prompts import Segment

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

SMALL = Sizes(lengths=(300, 600), hits=5, cold=2, throughput_reps=1, boundaries=(1, 100))


def shared_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_tokens_depend_on_the_seed_only():
    prefix = Segment("p", 50)
    first, second = (prompts.tokens((prefix, Segment(name, 8)), 50_000) for name in "ab")
    assert len(first) == 58 and shared_prefix(first, second) == 50
    assert min(first) >= 1000 and max(first) < 50_000


def test_ttft_hits_match_what_an_earlier_request_computed():
    seen = []
    for request in measure.ttft_plan(SMALL, "tail_replay"):
        ids = prompts.tokens(request.prompt, 200_000)
        longest = max((shared_prefix(ids, other) for other in seen), default=0)
        assert request.matched == min(longest, len(ids) - 1), request
        seen.append(ids)


@pytest.mark.parametrize(("engine", "ratios"), [("stock", (None,)), ("tail_replay", (0.05, 0.1))])
def test_ttft_plan_times_what_was_asked_for(engine, ratios):
    timed = [request for request in measure.ttft_plan(SMALL, engine) if request.timed]
    for length in SMALL.lengths:
        of_length = [r for r in timed if prompts.prompt_len(r.prompt) == length + SMALL.suffix]
        assert sum(r.kind == "cold" for r in of_length) == SMALL.cold
        for ratio in ratios:
            assert sum(r.kind == "again" and r.ratio == ratio for r in of_length) == SMALL.hits


def test_throughput_prompts_share_nothing():
    sent = [prompts.tokens(p, 200_000) for batch in measure.throughput_plan(SMALL) for p in batch.prompts]
    assert len({tuple(ids[:4]) for ids in sent}) == len(sent)


def test_correctness_plan_has_the_chunk_ends_and_judges_only_ratio_one():
    cases = measure.correctness_plan(SMALL, "tail_replay", chunk=256)
    assert {case.matched for case in cases if case.ratio == 1} == {1, 100, 255, 256, 257}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.ratio == 1 for case in measure.correctness_plan(SMALL, "stock", chunk=256))


@pytest.mark.parametrize("wrong", [{"cold": 0}, {"cold": 3, "hits": 2}, {"ratios": (0.0,)}, {"ratios": (1.5,)}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError):
        Sizes(**wrong)


def test_engine_plan_survives_json():
    plan = EnginePlan("stock", {"chunked_prefill_size": 256}, {}, ("ttft",), 1024, SMALL)
    assert EnginePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_spread():
    assert report.spread([1.0, 2.0, 6.0]) == {"n": 3, "mean": 3.0, "p50": 2.0, "min": 1.0, "max": 6.0}


@pytest.mark.parametrize(
    ("meta_info", "expected"),
    [
        ({}, None),
        ({"cached_tokens_details": None}, None),
        ({"cached_tokens_details": {"device": 5, "host": 0}}, None),
        ({"cached_tokens_details": {"device": 5, "tail_replay_replayed": 3}}, 3),
        ({"cached_tokens_details": {"device": 5, "tail_replay_replayed": 0}}, 0),
    ],
)
def test_what_the_plugin_tells(meta_info, expected):
    assert report.told(meta_info, "replayed") == expected


def sample(**changes):
    return {"kind": "again", "prompt_tokens": 364, "matched": 300, "ratio": 0.05, "ms": 5.0} | changes


def test_ttft_summary_keeps_every_cached_count_it_saw():
    samples = [sample(cached=300, replayed=64, ms=4.0), sample(cached=256, replayed=64)]
    samples.append(sample(cached=300, replayed=None))
    (row,) = report.summarise_ttft(samples)
    assert (row["cached"], row["replayed"], row["ms"]["n"], row["ms"]["min"]) == ([256, 300], [64], 3, 4.0)
    assert report.short_hits([row]) == [row]


def test_throughput_counts_prompt_tokens_or_new_tokens():
    common = {"prompt_tokens": 400, "new_tokens": 40, "seconds": 2.0}
    rates = report.summarise_throughput([{"kind": "prefill", **common}, {"kind": "decode", **common}])
    assert (rates["prefill"]["p50"], rates["decode"]["p50"]) == (200.0, 20.0)


def test_difference_stops_after_the_first_other_token():
    near, far = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.1), 2: math.log(0.7)}
    same = correctness.difference([1, 1], [1, 1], [near, near], [near, near])
    assert same == correctness.Difference(max_abs=0.0, kl=0.0, positions=2, same_tokens=True)
    split = correctness.difference([1, 1, 1], [1, 2, 2], [near, near, near], [near, near, far])
    assert (split.positions, split.max_abs, split.same_tokens) == (2, 0.0, False)
    assert correctness.difference([1], [2], [near], [far]).max_abs == pytest.approx(math.log(5))


def test_kl_counts_the_tokens_that_are_not_listed():
    a, b = {1: math.log(0.5)}, {1: math.log(0.25)}
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert correctness.difference([1], [1], [a], [b]).kl == pytest.approx(expected)


def test_answers_without_a_common_token_cannot_be_compared():
    with pytest.raises(ValueError, match="no common token"):
        correctness.difference([1], [2], [{1: -1.0}], [{2: -1.0}])


def case(**changes):
    row = {"name": "m=300", "how": "prefix", "ratio": 1.0, "matched": 300, "cached": 300, "replayed": 300}
    row["start"] = "zero"
    hit, cold, control = changes.pop("hit", 0.0), changes.pop("cold", 0.0), changes.pop("control", 5.0)
    row["hit_vs_cold"] = {"max_abs": abs(hit - cold), "kl": 0.0}
    row["control_vs_cold"] = {"max_abs": control, "kl": 1.0}
    return row | {"hit_first": {"7": -2.0 - hit}, "cold_first": {"7": -2.0 - cold}} | changes


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"hit": 0.19}, "ok"),
        ({"hit": -0.21}, "WRONG"),
        ({"hit": 0.19, "control": 0.3}, "blind"),
        ({"cached": 299}, "SHORT HIT"),
        ({"replayed": 64}, "SHORT TAIL"),
        ({"replayed": 64, "start": "seeded"}, "SHORT TAIL"),
        ({"replayed": 64, "start": "exact"}, "ok"),
        ({"replayed": None}, "SHORT TAIL"),
        ({"ratio": 0.05, "replayed": 64, "hit": 3.0}, "measured"),
        ({"name": "generated", "how": "generated", "hit": 3.0}, "measured"),
    ],
)
def test_judge_allows_twice_the_rounding_of_a_cold_prefill(changes, verdict):
    tail = [case(name="other", cold=0.1), case(cold=-0.05, **changes)]
    float16 = [case(name="other"), case(), case(name="generated", how="generated", hit=0.01, cold=0.0)]
    assert correctness.judge(tail, [], float16)[-1]["verdict"] == verdict


@pytest.mark.parametrize(("hit", "verdict"), [(0.2, "ok"), (0.3, "WRONG")])
def test_judge_allows_a_twentieth_of_another_prefix_in_float16(hit, verdict):
    assert correctness.judge([], [], [case(hit=hit, control=5.0)])[-1]["verdict"] == verdict


def test_judge_without_a_reference_gives_no_verdict():
    assert correctness.judge([case()], [case()], [])[-1]["verdict"] == "measured"


def engine(sections, error=None):
    return {"sections": sections, "error": error}


def outcome(result, ok=True, error=None):
    return {"ok": ok, "result": result, "error": error}


def test_report_names_every_problem_and_prints_what_there_is():
    samples = [sample(cached=299, replayed=64)]
    engines = {
        "stock": engine({"correctness": outcome([case()]), "ttft": outcome(None, False, "Traceback\nValueError: no")}),
        "tail_replay": engine(
            {"correctness": outcome([case(hit=1.0)]), "ttft": outcome(report.summarise_ttft(samples))}, "killed"
        ),
        "float16": engine({"correctness": outcome([case()])}),
    }
    document = report.assemble({"commit": "abc"}, engines, {"returncode": 1}, 12.3)
    assert document["problems"] == [
        "unit: pytest ended with 1",
        "stock ttft: ValueError: no",
        "tail_replay: killed",
        "correctness m=300: WRONG",
        "ttft again of 364: cached 299 of 300",
    ]
    assert json.loads(json.dumps(document))["commit"] == "abc"
    text = report.print_report(document)
    assert "PROBLEM tail_replay: killed" in text and "WRONG" in text


def test_throughput_is_printed_beside_stock():
    rate = {"n": 1, "mean": 1.0, "p50": 100.0, "min": 90.0, "max": 110.0}
    engines = {
        "stock": engine({"throughput": outcome({"prefill": rate})}),
        "tail_replay": engine({"throughput": outcome({"prefill": rate | {"p50": 99.0}})}),
    }
    assert "99.0%" in report.print_report(report.assemble({}, engines, None, 1.0))


def test_table_aligns_numbers_right():
    assert tables.table(("name", "n"), [("a", 5), ("long", 12345)]).splitlines() == [
        "name       n",
        "----  ------",
        "a          5",
        "long  12,345",
    ]


def test_settings_go_to_the_engine_that_they_name():
    pairs = ["a=1", "stock:b=2", 'tail_replay:c="x"']
    assert gpu_check.settings(pairs, "stock", json.loads) == {"a": 1, "b": 2}
    assert gpu_check.settings(pairs, "tail_replay", json.loads) == {"a": 1, "c": "x"}
    for wrong in ("a", "other:a=1"):
        with pytest.raises(SystemExit):
            gpu_check.settings([wrong], "stock", json.loads)


@pytest.mark.parametrize("shape", ["qwen3.5-4b", "qwen3.6-27b"])
def test_dry_run_prints_both_engines(shape):
    command = [sys.executable, SCRIPTS / "gpu_check", "--model-shape", shape, "--dry-run"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "engine stock" in text and "engine tail_replay" in text
    assert "20 x again of 8290 tokens, 8226 seen before, r=0.1" in text
