"""eval_quality against a server that keeps account of its cache: what is asked, kept, gone on from, and not counted."""

import json

import eval_quality
import pytest
from quality import answers, ask, id_tasks, ruler, runs
from quality.answers import AnswerFile, AnswersDiffer, Key
from quality.ask import Asker, Cached, Reply, WrongBoundary
from quality.codec import Codec
from quality.plan import Job
from quality.progress import Progress
from quality_helpers import FIRST, Characters, fake_server

from sglang_tailreplay.replay.tail import tail_length


@pytest.fixture
def replay():
    with fake_server("replay") as server:
        yield server


@pytest.fixture
def zero():
    with fake_server("zero") as server:
        yield server


@pytest.fixture
def model(tmp_path):
    """All that a model without a tokenizer is asked for."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 1024}')
    return folder


@pytest.fixture
def evaluate(tmp_path, model, replay, zero):
    def run(*more, count=2):
        given = ["--model-path", str(model), "--url", replay.url, "--zero-url", zero.url]
        given += ["--out", str(tmp_path / "out"), "--lengths", "200", "--tasks", "kv,vt", "--count", str(count)]
        return eval_quality.main([*given, *more])

    return run


PROMPT = id_tasks.prompt("kv", 200, 0, 0, 1024)


def asker(server, **options):
    return Asker(server.url, "run", None, **options)


# ---------------------------------------------------------------------------------------------------- one answer


def answer(server, prompt, cut, variant):
    return Cached(asker(server), prompt).answer(cut, variant)


def test_full_prefill_is_one_request_that_finds_nothing(replay):
    cached = Cached(asker(replay), PROMPT)
    for _ in range(2):  # what the first one left is not found
        found = cached.answer("question", "full")
        assert (found.cached, found.boundary, found.cut) == (0, 0, None)
    assert [body["input_ids"] for body in replay.requests] == [list(PROMPT.ids)] * 2


@pytest.mark.parametrize("cut", ["question", "random"])
def test_a_prompt_is_served_up_to_the_cut_from_what_was_computed_without_a_cache(replay, cut):
    cached = Cached(asker(replay), PROMPT)
    found = [cached.answer(cut, variant) for variant in ("r=0.1", "k=20", "r=0.1")]
    assert [body["input_ids"] for body in replay.requests] == [list(PROMPT.ids)] * 4
    first, *hits = replay.requests
    m = PROMPT.cut(cut)
    assert "custom_params" not in first["sampling_params"]
    assert [hit["sampling_params"]["custom_params"]["tail_replay_max_matched"] for hit in hits] == [m] * 3
    assert hits[0]["sampling_params"]["custom_params"]["tail_replay_ratio"] == 0.1
    assert len({body["extra_key"] for body in replay.requests}) == 1
    assert [(one.cached, one.boundary, one.cut) for one in found] == [(m, m, cut)] * 3
    assert [one.replayed for one in found] == [-(-m // 10), min(m, 20), -(-m // 10)]


def test_full_prefill_is_what_the_hits_build_on(replay):
    cached = Cached(asker(replay), PROMPT)
    cached.answer(None, "full")
    cached.answer("question", "r=0.1")
    assert len(replay.requests) == 2


def test_a_plain_extend_is_cut_before_its_tail(zero):
    m = PROMPT.boundary
    for ratio, tail in ((0.1, 64), (0.5, -(-m // 2)), (1, m)):
        found = answer(zero, PROMPT, "question", f"plain={ratio:g}")
        assert (found.cached, found.replayed) == (m - tail, 0)


@pytest.mark.parametrize(("m", "k"), [(1000, 64), (1000, 999), (64, 64), (10, 64), (8192, 1), (3, 2)])
def test_a_tail_is_asked_for_by_a_ratio_that_gives_it(m, k):
    assert tail_length(m, ask.asked_ratio(m, f"k={k}"), 1) == min(m, k)


def test_the_ids_of_an_answer_are_scored(replay):
    replay.output = list(PROMPT.references[0])
    assert answer(replay, PROMPT, None, "full").score == 1
    replay.output = [PROMPT.references[0][0], 0]
    assert answer(replay, PROMPT, None, "full").score == 0.5


def test_the_text_of_an_answer_is_scored(replay):
    codec = Codec(Characters())
    prompt = ruler.prompt("niah_single", 600, 0, 0, codec, ruler.Material())
    replay.output = [FIRST + ord(c) for c in f" {prompt.references[0]}."]
    found = Cached(Asker(replay.url, "run", codec), prompt).answer("question", "r=0.05")
    assert (found.text, found.score) == (f" {prompt.references[0]}.", 1)
    assert replay.requests[-1]["sampling_params"]["ignore_eos"] is False


GOOD = Reply([1], cached=100, matched=100, replayed=10, generation=1)


@pytest.mark.parametrize(
    ("variant", "change", "max_tokens"),
    [
        ("r=0.1", {}, None),
        ("r=0.1", {"replayed": 64}, None),  # the server has a least number of tokens
        ("r=1", {"replayed": 100, "generation": 0}, None),
        ("r=0.5", {}, 10),  # or a largest
        ("k=10", {}, None),
        ("zero", {"replayed": 0}, None),
        ("plain=0.1", {"replayed": 0}, None),
        ("anchored=512", {"generation": 0, "start": "exact", "anchored": 1}, None),
        ("seeded", {"start": "seeded", "anchored": 1}, None),
    ],
)
def test_what_is_served_as_meant_passes(variant, change, max_tokens):
    ask.check(GOOD._replace(**change), 100, variant, max_tokens)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("r=0.1", {"cached": 99}, "meant to be served with 100 cached tokens, served with 99"),
        ("r=0.1", {"cached": 101}, "served with 101"),
        ("r=0.1", {"matched": None, "replayed": None}, "mode off"),
        ("r=0.1", {"replayed": 9}, "9 tokens were replayed, r=0.1 asks for 10 of 100"),
        ("r=0.1", {"generation": 2}, "builds on 2"),
        ("r=0.1", {"generation": 0, "anchored": 1}, "saves states"),
        ("k=20", {}, "10 tokens were replayed, k=20 asks for 20 of 100"),
        ("plain=0.1", {}, "not in mode zero"),
        ("anchored=512", {"start": "seeded", "anchored": 1}, "no saved one near"),
        ("anchored=512", {"start": "exact", "anchored": 1}, "no saved one near"),  # on top of an approximation
        ("r=1", {"replayed": 100}, "builds on 1"),  # another replay lies behind its prefix
        ("zero", {}, "not in mode zero"),
        ("full", {}, "meant to be served with 0"),
    ],
)
def test_what_is_not_served_as_meant_is_no_data_point(variant, change, message):
    with pytest.raises(WrongBoundary, match=message):
        ask.check(GOOD._replace(**change), 0 if variant == "full" else 100, variant)


# ---------------------------------------------------------------------------------------------------- a run


def test_a_run_asks_everything_once_and_goes_on_where_it_was(evaluate, replay, zero, tmp_path, capsys):
    assert evaluate() == 0
    prompts = 2 * 2
    assert len(replay.requests) == prompts * (1 + 2 * 2)  # full; two cuts at two ratios
    assert len(zero.requests) == prompts * (1 + 2)  # a prefill of its own
    first = (tmp_path / "out" / "answers.jsonl").read_text()
    replay.requests.clear(), zero.requests.clear()

    assert evaluate() == 0
    assert not replay.requests and not zero.requests
    assert (tmp_path / "out" / "answers.jsonl").read_text() == first
    assert "28 of 28 answers" in capsys.readouterr().out

    # More of the same adds to it; both servers at a time.
    assert evaluate("--ratios", "0.05,0.1,0.2", "--side-by-side", "--seconds", "600", count=3) == 0
    ratios = [body["sampling_params"].get("custom_params", {}).get("tail_replay_ratio") for body in replay.requests]
    assert (ratios.count(0.2), ratios.count(0.1), ratios.count(None)) == (6 * 2, 2 * 2, 6)


def test_what_does_not_fit_into_the_time_is_left_for_the_next_run(evaluate, replay, tmp_path):
    assert evaluate("--seconds", "1e-9") == 0 and not replay.requests
    assert "No prompt has been answered" in (tmp_path / "out" / "report.md").read_text()
    assert evaluate() == 0 and len(replay.requests) == 4 * 5


def test_the_report_has_tables_numbers_and_a_plot(evaluate, tmp_path):
    evaluate()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["cuts"]["random"]["cells"]) == {"R-kv@200", "R-vt@200"}
    assert set(report["cuts"]["question"]["benchmarks"]["ruler"]["variants"]) == {"full", "zero", "r=0.05", "r=0.1"}
    assert not report["problems"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("R-kv@200") == 2 and "PROBLEM" not in text
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"quality.svg", "quality.png"}


def test_a_half_written_line_is_asked_again(evaluate, replay, tmp_path):
    evaluate()
    path = tmp_path / "out" / "answers.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    replay.requests.clear()
    evaluate()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(whole.splitlines()) and len({tuple(line.items())[0] for line in lines[1:]}) == 4


@pytest.mark.parametrize(
    ("more", "message"), [(("--seed", "1"), "seed=0, this run has 1"), (("--min-tokens", "4"), "min_tokens")]
)
def test_answers_under_other_settings_are_not_mixed(evaluate, more, message):
    evaluate()
    with pytest.raises(SystemExit, match=message):
        evaluate(*more)


def test_an_answer_to_another_prompt_is_not_taken(tmp_path, replay):
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    kept.add(answer(replay, PROMPT, "question", "full"))
    assert kept.find(Key(PROMPT.name, None, "full"), PROMPT.digest).score == 0
    with pytest.raises(AnswersDiffer, match="another prompt"):
        kept.find(Key(PROMPT.name, None, "full"), "0" * 16)


def test_short_hits_are_errors_and_are_asked_again_by_the_next_run(evaluate, replay, zero, tmp_path, capsys):
    replay.short_by = 1
    assert evaluate("--cuts", "question", "--concurrency", "1", "--modes", "full,replay", "--ratios", "0.1") == 1
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("PROBLEM not counted") == 4 and "cached tokens, served with" in text
    variants = [json.loads(line)["variant"] for line in (tmp_path / "out" / "answers.jsonl").open() if "score" in line]
    assert variants == ["full"] * 4
    replay.short_by = 0
    assert evaluate("--cuts", "question", "--modes", "full,replay", "--ratios", "0.1") == 0
    assert "PROBLEM" not in (tmp_path / "out" / "report.md").read_text()


def test_a_hit_that_is_short_once_is_asked_again(tmp_path, replay, monkeypatch):
    replay.short_by = 3
    again = replay.generate

    def heals(body):
        reply = again(body)
        replay.short_by = 0 if len(replay.requests) > 1 else 3
        return reply

    monkeypatch.setattr(replay, "generate", heals)
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    outcome = runs.run([Job(PROMPT, "question", "r=0.1")], asker(replay), kept, 1, Progress(1, 0, "test"))
    assert not outcome.errors and len(kept.answers) == 1 and len(replay.requests) == 4


def test_a_server_that_never_hits_is_not_asked_for_ever(tmp_path, replay):
    replay.short_by = 1
    jobs = [Job(id_tasks.prompt("kv", 200, i, 0, 1024), "question", "r=0.1") for i in range(40)]
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    outcome = runs.run(jobs, asker(replay), kept, 1, Progress(40, 0, "test"))
    assert outcome.stopped.startswith(f"{runs.PATIENCE} errors in a row") and len(outcome.errors) == runs.PATIENCE


def test_a_server_in_the_wrong_mode_is_found_out(evaluate, replay, zero, tmp_path):
    replay.mode = "zero"
    assert evaluate("--modes", "full,replay") == 1
    assert "asks for" in (tmp_path / "out" / "report.md").read_text()


def test_a_replay_of_all_rows_that_answers_otherwise_is_a_problem(evaluate, replay, tmp_path, monkeypatch):
    right = replay.generate

    def wrong_after_a_hit(body):
        reply = right(body)
        return {**reply, "output_ids": [7 if reply["meta_info"]["cached_tokens"] else 8]}

    monkeypatch.setattr(replay, "generate", wrong_after_a_hit)
    assert evaluate("--modes", "full,replay", "--ratios", "0.1") == 0  # an approximation may be wrong
    assert evaluate("--modes", "full,replay", "--ratios", "0.1,1") == 1
    assert "replay of this server is broken" in (tmp_path / "out" / "report.md").read_text()


def test_a_dead_server_is_an_error_with_its_address(tmp_path, model):
    out = tmp_path / "out"
    given = ["--model-path", str(model), "--url", "http://127.0.0.1:9", "--modes", "full", "--out", str(out)]
    assert eval_quality.main([*given, "--lengths", "200", "--tasks", "kv", "--count", "2"]) == 1
    assert "http://127.0.0.1:9/generate" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--ratios", "0,0.1"), "--ratios"),
        (("--count", "0"), "--count"),
        (("--url", "http://x"), "--zero-url"),
        (("--url", "http://x", "--modes", "full", "--", "--dtype", "float32"), "after --"),
        (("--", "--tail-replay-anchor-interval", "512"), "do not depend on r"),
        (("--modes", "some"), "some not in"),
        (("--tails", "0"), "--tails"),
        (("--servers", "replay=0"), "'replay=0' is not NAME=COUNT"),
        (("--servers", "seeded=2"), "seeded is none of replay, zero"),
        (("--url", "http://x", "--modes", "full,anchored"), "anchored-1024 is a server that this script starts"),
    ],
)
def test_bad_arguments_are_refused(model, given, message, capsys):
    with pytest.raises(SystemExit):
        eval_quality.parse(["--model-path", str(model), *given])
    assert message in capsys.readouterr().err


def test_flags_go_to_the_server_of_a_mode(model):
    options = eval_quality.parse(["--model-path", str(model), "--max-tokens", "512", "--", "--dtype", "float32"])
    assert eval_quality.server_flags(options, "zero", text=False) == [
        *("--skip-tokenizer-init", "--dtype", "float32"),
        *("--tail-replay-mode", "zero", "--tail-replay-max-tokens", "512"),
    ]
    assert "--skip-tokenizer-init" in eval_quality.server_flags(options, "replay", text=True)  # it has none
    options.server_flag, options.modes = ["anchored-1024:--chunked-prefill-size=512"], ("full", "anchored")
    assert eval_quality.server_flags(options, "anchored-1024", text=False)[-1] == "--chunked-prefill-size=512"
    (model / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in eval_quality.server_flags(options, "replay", text=True)


def test_servers_may_share_the_replays(model, tmp_path):
    """All jobs of a prompt on one of them: it has the prompt in its cache."""
    given = ["--model-path", str(model), "--servers", "replay=2", "--lengths", "200"]
    options = eval_quality.parse(given)
    prompts = [id_tasks.prompt("kv", 200, i, 0, 1024) for i in range(3)]
    jobs = [Job(prompt, "question", variant) for prompt in prompts for variant in ("r=0.05", "r=0.1")]
    asking = eval_quality.Asking(options, None, AnswerFile(tmp_path / "answers.jsonl", {}))
    (_, log, first), (_, log_2, second) = asking._parts("replay", jobs)
    assert (log, log_2) == ("replay", "replay-2")
    assert [job.prompt.index for job in first] == [0, 0, 2, 2] and [job.prompt.index for job in second] == [1, 1]
    assert len(asking._parts("zero", jobs)) == 1


def test_a_server_that_does_not_start_is_a_problem_of_its_own(evaluate, model, tmp_path, monkeypatch):
    """Of the run's end, with what it said; the others are asked."""
    import server as serving

    class Fake:
        base_url = "http://127.0.0.1:9"

    def refuses(started, seconds):
        raise serving.ServerDied("server not ready\nout of memory")

    monkeypatch.setattr(serving, "start", lambda *args, **kwargs: Fake())
    monkeypatch.setattr(serving, "wait_ready", refuses)
    monkeypatch.setattr(serving, "stop", lambda started: None)
    given = ["--model-path", str(model), "--lengths", "200", "--tasks", "kv", "--count", "1", "--modes", "full"]
    assert eval_quality.main([*given, "--out", str(tmp_path / "none")]) == 1
    report = (tmp_path / "none" / "report.md").read_text()
    assert "PROBLEM stopped after server-replay.log: server not ready" in report and "out of memory" in report


def test_token_ids_need_a_config(tmp_path):
    with pytest.raises(SystemExit, match="config.json"):
        eval_quality.main(["--model-path", str(tmp_path / "no-model"), "--ids", "--out", str(tmp_path / "out")])


def test_variants_have_names():
    assert [answers.replay(r) for r in (0.05, 0.1, 1.0)] == ["r=0.05", "r=0.1", "r=1"]
    assert [answers.ratio_of(v) for v in ("full", "zero", "r=0.05", "r=1")] == [None, None, 0.05, 1]
