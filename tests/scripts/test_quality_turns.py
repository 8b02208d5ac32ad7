"""eval_turns: conversations, how they are continued, and what is kept of them."""

import pytest
from quality import drift, facts, id_tasks, turns, turns_report
from quality.answers import Answer, AnswerFile
from quality.ask import Asker, Reply, WrongBoundary
from quality_helpers import fake_server
from train import vocabulary


@pytest.fixture
def server():
    with fake_server("replay") as server:
        yield server


@pytest.mark.parametrize("task", turns.WORD_TASKS)
def test_turns_over_words_ask_for_different_facts_of_the_text(task):
    talk = turns.over_words(task, 900, 4, 0, 0)
    assert talk == turns.over_words(task, 900, 4, 0, 0) != turns.over_words(task, 900, 4, 1, 0)
    assert [turn.cut for turn in talk.turns][0] == 900
    text = vocabulary.text(talk.turns[0].prompt.ids)
    subjects = []
    for (cut, prompt), after in zip(talk.turns, [*talk.turns[1:], None], strict=True):
        question = vocabulary.text(prompt.ids[cut:])
        assert question in ("what is the code ? answer :", "trace it ? answer :")
        before = vocabulary.text(prompt.ids[:cut]).split()
        subjects.append(before[len(before) - before[::-1].index("consider")])
        code = prompt.references[-1]
        assert f"is {code} ." in text  # the fact
        if after:  # the history holds the right answer
            answered = vocabulary.text(after.prompt.ids[len(prompt.ids) :])
            assert after.prompt.ids[: len(prompt.ids)] == prompt.ids and answered.startswith(
                " ".join(prompt.references)
            )
    assert len(set(subjects)) == 4


@pytest.mark.parametrize("task", turns.ID_TASKS)
def test_turns_over_ids_ask_for_different_keys_of_the_text(task):
    talk = turns.over_ids(task, 1100, 4, 0, 0, 1024)
    first = talk.turns[0]
    assert first.cut == 1100 and len({turn.prompt.ids[turn.cut + 1] for turn in talk.turns}) == 4
    for cut, prompt in talk.turns:
        ask, key, answer = prompt.ids[cut:]
        (reference,) = prompt.references
        at = [i for i, token in enumerate(prompt.ids[: first.cut]) if token == key]
        assert (ask, answer) == (id_tasks.ASK, id_tasks.ANSWER) and len(reference) == prompt.new_tokens
        assert any(prompt.ids[i + 2] == reference[0] for i in at)


def test_a_text_without_enough_facts_is_refused():
    with pytest.raises(SystemExit, match="no 30 facts"):
        turns.over_words("niah", 900, 30, 0, 0)


TALK = turns.over_ids("kv", 300, 3, 0, 0, 1024)


def test_a_turn_is_asked_on_top_of_the_last_one(server, tmp_path):
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    drift.converse(Asker(server.url, "run", None), TALK, "r=0.05", kept)
    said, asked = server.requests[::2], server.requests[1::2]
    assert [body["input_ids"] for body in said] == [list(turn.prompt.ids[: turn.cut]) for turn in TALK.turns]
    assert [body["input_ids"] for body in asked] == [list(turn.prompt.ids) for turn in TALK.turns]
    assert len({body["extra_key"] for body in server.requests}) == 1
    assert {body["sampling_params"]["custom_params"]["tail_replay_ratio"] for body in server.requests} == {0.05}
    answers = [kept.answers[key] for key in drift.keys(TALK, "r=0.05")]
    assert [one.cached for one in answers] == [turn.cut for turn in TALK.turns]
    assert drift.is_answered(TALK, "r=0.05", kept) and not drift.is_answered(TALK, "full", kept)


def test_full_turns_find_nothing(server, tmp_path):
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    drift.converse(Asker(server.url, "run", None), TALK, "full", kept)
    assert [one.cached for one in kept.answers.values()] == [0, 0, 0] and len(server.requests) == 3


def test_a_conversation_with_a_lost_turn_is_not_kept(server, tmp_path):
    kept = AnswerFile(tmp_path / "answers.jsonl", {})
    server.short_by = 1
    with pytest.raises(WrongBoundary, match="turn 1: meant to be served with"):
        drift.converse(Asker(server.url, "run", None), TALK, "r=0.05", kept)
    assert not kept.answers


HIT = Reply([1], cached=100, matched=100, replayed=10, generation=1)


@pytest.mark.parametrize(
    ("variant", "change", "fits"),
    [
        ("r=0.05", {"generation": 5}, True),
        ("r=0.05", {"cached": 99}, False),
        ("fresh=0.05", {"cached": 80}, True),
        ("fresh=0.05", {"generation": 2}, False),  # it was built on a replay after all
        ("fresh=0.05", {"cached": 0}, False),
        ("anchored=512", {"generation": 0, "start": "exact"}, True),
        ("anchored=512", {"start": "zero"}, False),
    ],
)
def test_what_a_turn_may_build_on(variant, change, fits):
    reply = HIT._replace(**change)
    if fits:
        drift.check(reply, 2, 100, variant)
    else:
        with pytest.raises(WrongBoundary, match="turn 2"):
            drift.check(reply, 2, 100, variant)


def test_every_way_has_the_server_that_it_needs():
    ways = drift.ways((0.05,), (512,), with_zero=True)
    flags = {way.variant: drift.flags_of(way.server) for way in ways}
    assert flags["fresh=0.05"] == ["--tail-replay-max-generation", "0"]
    assert flags["anchored=512"] == ["--tail-replay-anchor-interval", "512"]
    assert flags["r=0.05"] == flags["full"] == ["--tail-replay-mode", "replay"]
    assert flags["zero"] == ["--tail-replay-mode", "zero"]
    assert drift.asked_ratio("fresh=0.05") == drift.asked_ratio("r=0.05") == 0.05 and drift.asked_ratio("full") is None


def test_only_conversations_that_all_ways_have_had_count(server, tmp_path):
    kept, asker = AnswerFile(tmp_path / "answers.jsonl", {}), Asker(server.url, "run", None)
    server.output = list(TALK.turns[0].prompt.references[0])
    for variant in ("full", "r=0.05"):
        drift.converse(asker, TALK, variant, kept)
    drift.converse(asker, turns.over_ids("kv", 300, 3, 1, 0, 1024), "full", kept)
    numbers = turns_report.document(kept.answers.values())
    assert (numbers["conversations"], numbers["asked"]) == (1, 2) and list(numbers["variants"]) == ["full", "r=0.05"]
    first, second = (numbers["variants"]["r=0.05"][turn] for turn in (1, 2))
    assert first["score"]["value"] == 1 > second["score"]["value"] and first["same_as_full"]["value"] == 1
    assert "| 3 |" in turns_report.tables(numbers)
    assert {path.suffix for path in turns_report.draw(numbers, "model", tmp_path / "turns")} == {".svg", ".png"}


def test_drift_is_told_against_answers_that_build_on_nothing():
    """Right in the first two of eight turns, then, on top of replays, wrong."""
    scores = {"full": lambda turn: 1.0, "fresh=0.05": lambda turn: 1.0, "r=0.05": lambda turn: float(turn <= 2)}
    answers = [
        Answer(f"t@9/{i}", "t@9", drift.turn_name(turn), variant, "", 9, 8, 8, 1, 1, [1], None, score(turn), 0.1)
        for i in range(50) for turn in range(1, 9) for variant, score in scores.items()
    ]  # fmt: skip
    numbers = turns_report.document(answers)
    assert list(numbers["built_on"]) == ["r=0.05"]
    found = {span: one["value"] for span, one in numbers["built_on"]["r=0.05"].items()}
    assert found == pytest.approx({"1": 0, "2-4": -2 / 3, "5-8": -1})
    assert "| r=5% | +0.000 [-0.071, +0.071] | -0.667" in turns_report.tables(numbers)
    two = turns_report.document([one for one in answers if drift.number_of(one.cut) <= 2])
    assert list(two["built_on"]["r=0.05"]) == ["1", "2"]


def test_nothing_is_asked_for_that_training_has_seen():
    assert facts.EVALUATION not in (1, 2)  # first numbers of the seeds of training and of its own check
