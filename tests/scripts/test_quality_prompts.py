"""Prompts of eval_quality: they have the wanted length, and the answer is in the context and nowhere else."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality import id_tasks, longbench, plan, ruler, words
from quality.codec import Codec, without_middle
from quality.prompt import CUTS, DoesNotFit, Prompt, fill
from quality_helpers import BOS, Characters, squad, write_longbench

CODEC = Codec(Characters())
TEXT_TASKS = [name for name in ruler.TASKS if name != "qa"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    path = tmp_path_factory.mktemp("qa") / "squad.json"
    path.write_text(json.dumps(squad(paragraphs=40)))
    return ruler.Material(documents=ruler.read_documents(path))


def text_prompt(name, length, index=0, seed=0, material=None):
    material = material or ruler.Material()
    prompt = ruler.prompt(name, length, index, seed, CODEC, material)
    return prompt, CODEC.decode(prompt.ids[: prompt.boundary]), CODEC.decode(prompt.ids[prompt.boundary :])


# ---------------------------------------------------------------------------------------------------- lengths, cuts


@given(st.integers(0, 400), st.integers(1, 30), st.integers(0, 3000), st.one_of(st.none(), st.integers(0, 50)))
def test_fill_finds_the_largest_size(base, per_unit, budget, most):
    def count(size):
        return base + per_unit * size + size // 3

    if base > budget:
        with pytest.raises(DoesNotFit):
            fill(lambda size: size, count, budget, most)
        return
    size, built = fill(lambda size: size, count, budget, most)
    assert built == size and count(size) <= budget
    assert size == most or count(size + 1) > budget


def test_fill_takes_few_steps():
    asked = []
    fill(lambda size: asked.append(size) or size, lambda size: 900 + 13 * size, 65536)
    assert len(asked) <= 12


@pytest.mark.parametrize("length", [3000, 8192])
@pytest.mark.parametrize("name", [*TEXT_TASKS, "qa"])
def test_a_text_prompt_has_the_wanted_length_or_just_below(name, length, material):
    prompt, *_ = text_prompt(name, length, material=material)
    total = len(prompt.ids) + prompt.new_tokens
    assert total <= length
    if name != "qa":  # it may run out of documents
        assert total > length - 150  # a sentence; a word three times in cwe; a few words in fwe
    assert prompt.ids[0] == BOS and prompt.ids.count(BOS) == 1


@pytest.mark.parametrize("length", [64, 127, 500, 1024])
@pytest.mark.parametrize("name", id_tasks.TASKS)
def test_an_id_prompt_has_exactly_the_wanted_length(name, length):
    for index in range(5):
        prompt = id_tasks.prompt(name, length, index, 0, 1024)
        assert len(prompt.ids) + prompt.new_tokens == length
        assert all(0 <= token < 1024 for token in prompt.ids)


@pytest.mark.parametrize("text", [True, False])
def test_prompts_depend_on_seed_and_index_only(text):
    def make(index, seed):
        return text_prompt("vt", 3000, index, seed)[0] if text else id_tasks.prompt("vt", 500, index, seed, 1024)

    assert make(0, 0) == make(0, 0)
    assert len({make(i, s).digest for i in range(3) for s in range(3)}) == 9


def test_cuts_lie_in_the_context():
    prompts = [id_tasks.prompt("kv", 200, index, 0, 1024) for index in range(200)]
    assert all(prompt.cut("question") == prompt.boundary for prompt in prompts)
    cuts = [prompt.cut("random") for prompt in prompts]
    assert all(1 <= cut < prompt.boundary for cut, prompt in zip(cuts, prompts, strict=True))
    assert min(cuts) < 40 and max(cuts) > 160  # all over the context
    assert cuts == [prompt.cut("random") for prompt in prompts]


@pytest.mark.parametrize("boundary", [1, 10])
def test_a_prompt_needs_context_and_question(boundary):
    with pytest.raises(ValueError, match="boundary"):
        Prompt("ruler", "niah", 10, 0, tuple(range(10)), boundary, 1, ("x",), "all_found")


# ---------------------------------------------------------------------------------------------------- text tasks


@pytest.mark.parametrize(
    ("name", "needles", "answers"),
    [
        ("niah_single", 1, 1),
        ("niah_multikey", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_in_the_haystack_once(name, needles, answers):
    prompt, context, question = text_prompt(name, 3000)
    assert context.count("One of the secret numbers for") == needles
    assert len(set(prompt.references)) == answers
    for value in prompt.references:
        assert context.count(value) == 1 and value not in question
        key = context[: context.index(value)].rpartition("numbers for ")[2].removesuffix(" is: ")
        assert key in question


def test_a_dense_haystack_is_made_of_needles():
    prompt, context, question = text_prompt("niah_multikey_dense", 3000)
    assert context.count("One of the secret numbers for") > 30
    key = question.partition("the secret numbers for ")[2].partition(" that")[0]
    assert context.count(f"numbers for {key} is") == 1
    assert f"numbers for {key} is: {prompt.references[0]}." in context


def test_needles_lie_anywhere():
    places = []
    for index in range(30):
        prompt, context, _ = text_prompt("niah_single", 3000, index)
        places.append(context.index(prompt.references[0]) / len(context))
    assert min(places) < 0.25 and max(places) > 0.75


def test_variables_are_assigned_in_order():
    prompt, context, question = text_prompt("vt", 3000)
    first, *others = prompt.references
    value = question.partition("have the value ")[2].partition(",")[0]
    places = [context.index(f"VAR {first} = {value}.")]
    for name, before in zip(others, prompt.references, strict=False):
        places.append(context.index(f"VAR {name} = VAR {before}."))
    assert places == sorted(places)
    assert not any(name in question for name in prompt.references)


def task_text(context):
    """Without the solved example."""
    return context.strip().rpartition("\n\n")[2]


@pytest.mark.parametrize("length", [2000, 3000, 9000])
def test_common_words_are_the_most_frequent(length):
    prompt, context, _ = text_prompt("cwe", length)
    counts = Counter(word for word in task_text(context).split() if not word.endswith("."))
    most = counts.most_common(len(prompt.references) + 1)
    assert {word for word, _ in most[:-1]} == set(prompt.references)
    assert most[-2][1] > 2 * most[-1][1]


@pytest.mark.parametrize("length", [1000, 1500, 3000, 9000])
def test_coded_words_are_the_most_frequent_without_a_tie(length):
    prompt, context, _ = text_prompt("fwe", length)
    counts = Counter(task_text(context).split())
    (dots, _), *most = counts.most_common(5)
    assert dots == "..."
    assert tuple(word for word, _ in most[:3]) == prompt.references
    assert all(a[1] > b[1] for a, b in zip(most, most[1:], strict=False))


def test_qa_asks_every_question_once_about_a_document_that_is_there(material):
    asked = set()
    for index in range(80):
        prompt, context, question = text_prompt("qa", 900, index, material=material)
        asked.add(question)
        person = question.partition("of person ")[2].partition("?")[0]
        assert f"Person {person} lives in {prompt.references[0]}," in context
        assert context.count("Document ") > 5
    assert len(asked) == 80


def test_qa_shows_no_more_documents_than_there_are(material):
    _, context, _ = text_prompt("qa", 50_000, material=material)
    assert context.count("Document ") == 40


@pytest.mark.parametrize("text", ["[]", '{"data": [{"paragraphs": [{"context": "x"}]}]}', "no json"])
def test_other_files_are_no_qa_files(tmp_path, text):
    path = tmp_path / "qa.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not a file in SQuAD's format"):
        ruler.read_documents(path)


def test_a_length_that_is_too_small_says_so():
    with pytest.raises(SystemExit, match=r"ruler/cwe@300: needs \d+ tokens.*--lengths"):
        text_prompt("cwe", 300)


def test_the_haystack_may_be_a_file(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_text("First sentence. Second one!\nIs this the third? Yes.")
    assert words.sentences(path) == ["First sentence.", "Second one!", "Is this the third?", "Yes."]


# ---------------------------------------------------------------------------------------------------- id tasks


@pytest.mark.parametrize("name", ["niah", "kv"])
def test_the_asked_pair_is_in_the_context(name):
    for index in range(10):
        prompt = id_tasks.prompt(name, 600, index, 0, 1024)
        (answer,) = prompt.references
        mark, key, end = prompt.ids[prompt.boundary :]
        assert (mark, end) == (id_tasks.ASK, id_tasks.ANSWER)
        unit = (id_tasks.KEY_IS, key, id_tasks.IS, *answer, id_tasks.END)
        found = [i for i in range(prompt.boundary) if prompt.ids[i : i + len(unit)] == unit]
        assert len(found) == 1
        assert prompt.ids.count(key) == 2


def test_a_chain_leads_from_the_asked_key_to_its_value():
    prompt = id_tasks.prompt("vt", 600, 0, 0, 1024)
    context = prompt.ids[: prompt.boundary]
    _, key, _ = prompt.ids[prompt.boundary :]
    steps = [context[i : i + 4] for i in range(len(context)) if context[i] == id_tasks.VAR]
    assigned = {name: source for _, name, _, source in steps}
    chain, at = [], key
    while at in assigned:
        at = assigned[at]
        chain.append(at)
    assert (tuple(chain),) == prompt.references
    order = [name for _, name, _, _ in steps]
    assert [order.index(name) for name in (key, *chain[:-1])] == sorted(
        (order.index(name) for name in (key, *chain[:-1])), reverse=True
    )


def test_common_ids_are_the_most_frequent_keys():
    prompt = id_tasks.prompt("cwe", 1024, 0, 0, 1024)
    keys = id_tasks.Vocabulary.of(1024).keys
    most = Counter(token for token in prompt.ids[: prompt.boundary] if token in keys).most_common(4)
    assert (tuple(sorted(token for token, _ in most)),) == prompt.references


def test_a_tiny_vocabulary_is_refused():
    with pytest.raises(SystemExit, match="at least 128"):
        id_tasks.prompt("kv", 100, 0, 0, 100)


# ---------------------------------------------------------------------------------------------------- LongBench


def longbench_prompt(tmp_path, task, length, index=0):
    folder = write_longbench(tmp_path / "lb", [task])
    records = longbench.read(folder, task, 5)
    assert len(records) == 3
    return longbench.prompt(task, length, index, records[index], CODEC)


@pytest.mark.parametrize("task", longbench.TASKS)
def test_a_record_that_fits_is_whole(tmp_path, task):
    prompt = longbench_prompt(tmp_path, task, 3000, index=1)
    context, question = (CODEC.decode(part) for part in (prompt.ids[: prompt.boundary], prompt.ids[prompt.boundary :]))
    assert "The keeper of lamp 1 is Ada." in context and context.endswith("word59")
    assert "Who keeps lamp 1?" in question and "Who keeps" not in context
    assert prompt.references == ("Ada", "Ada, the keeper")


def test_a_record_that_is_too_long_loses_its_middle(tmp_path):
    prompt = longbench_prompt(tmp_path, "hotpotqa", 400)
    context = CODEC.decode(prompt.ids[: prompt.boundary])
    assert len(prompt.ids) + prompt.new_tokens == 400
    assert "The keeper" in context and context.endswith("word59") and "word30" not in context


@pytest.mark.parametrize(("most", "kept"), [(0, []), (1, [1]), (4, [1, 2, 8, 9]), (5, [1, 2, 3, 8, 9]), (9, None)])
def test_without_middle(most, kept):
    whole = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert without_middle(whole, most) == (whole if kept is None else kept)


def test_a_record_whose_question_does_not_fit_says_so(tmp_path):
    with pytest.raises(SystemExit, match=r"longbench/qmsum@512: record 0 needs \d+ tokens"):
        longbench_prompt(tmp_path, "qmsum", 512)


def test_braces_in_a_question_are_text(tmp_path):
    (tmp_path / "musique.jsonl").write_text(json.dumps({"context": "x", "input": "{0} {who}?", "answers": ["a"]}))
    (record,) = longbench.read(tmp_path, "musique", 1)
    assert "{0} {who}?" in CODEC.decode(longbench.prompt("musique", 2000, 0, record, CODEC).ids)


@pytest.mark.parametrize("line", ["{}", "[1]", "half a", '{"context": "x", "input": "y", "answers": []}'])
def test_a_bad_record_is_named(tmp_path, line):
    (tmp_path / "qasper.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(SystemExit, match=r"qasper\.jsonl:2: "):
        longbench.read(tmp_path, "qasper", 1)


# ---------------------------------------------------------------------------------------------------- the plan


def choice(**given):
    defaults = dict(benchmarks=("ruler",), tasks=None, modes=plan.DEFAULT_MODES, ratios=(0.05, 0.1), cuts=CUTS)
    return plan.Choice(**{**defaults, "lengths": (200, 300), "count": 3, "seed": 0, **given})


def test_every_prompt_is_asked_in_every_mode_on_the_right_server():
    prompts = list(plan.prompts(choice(), None, 1024))
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 4 * 2 * 3
    every = choice(modes=plan.MODES, tails=(64,), anchor_intervals=(512, 1024))
    asked = {server: plan.jobs(every, prompts, server) for server in plan.servers(every)}
    of_first = {server: [job[1:] for job in jobs if job.prompt is prompts[0]] for server, jobs in asked.items()}
    replays = [(cut, f"r={ratio}") for cut in ("question", "random") for ratio in (0.05, 0.1)]
    zeros = [(None, "again"), ("question", "zero"), ("random", "zero")]
    assert of_first == {
        "replay": [(None, "full"), *replays, ("question", "k=64")],
        "zero": [*zeros, ("question", "plain=0.05"), ("question", "plain=0.1")],
        "anchored-512": [("question", "anchored=512"), ("random", "anchored=512")],
        "anchored-1024": [("question", "anchored=1024"), ("random", "anchored=1024")],
        "seeded": [("question", "seeded")],
    }


def test_a_run_that_is_cut_short_has_every_cell():
    prompts = list(plan.prompts(choice(), None, 1024))
    assert len({prompt.cell for prompt in prompts[:8]}) == 8


@pytest.mark.parametrize(
    ("modes", "jobs"),
    [
        (("full",), {"replay": 1}),
        (("full", "zero"), {"zero": 3}),
        (("zero",), {"zero": 2}),
        (("full", "plain"), {"zero": 3}),
        (("full", "anchored"), {"anchored-1024": 3}),
        (("full", "replay", "seeded"), {"replay": 5, "seeded": 1}),
    ],
)
def test_a_mode_that_is_not_asked_for_needs_no_server(modes, jobs):
    only = choice(modes=modes, anchor_intervals=(1024,))
    prompts = list(plan.prompts(only, None, 1024))[:1]
    assert {server: len(plan.jobs(only, prompts, server)) for server in plan.servers(only)} == jobs


def test_missing_longbench_files_are_named(tmp_path):
    write_longbench(tmp_path, ["qasper", "qmsum", "hotpotqa"])
    with pytest.raises(SystemExit, match=r"missing narrativeqa\.jsonl, musique\.jsonl"):
        plan.check(choice(benchmarks=("longbench",), longbench_dir=tmp_path), CODEC)
    plan.check(choice(benchmarks=("longbench",), longbench_dir=tmp_path, tasks=("qmsum",)), CODEC)
    with pytest.raises(SystemExit, match="narrativeqa.jsonl, qasper.jsonl"):
        plan.check(choice(benchmarks=("longbench",)), CODEC)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(SystemExit, match="no tokenizer"):
        plan.check(choice(benchmarks=("longbench",)), None)
    with pytest.raises(SystemExit, match="niah_single not in"):
        plan.check(choice(tasks=("niah_single",)), None)
    with pytest.raises(SystemExit, match="--qa-file"):
        plan.ruler_tasks(choice(tasks=("qa",)), text=True)
    assert "qa" not in plan.ruler_tasks(choice(), text=True)


# ---------------------------------------------------------------------------------------------------- chat templates


def test_a_chat_template_goes_around_context_and_question():
    ids, boundary = Codec(Characters(), chat=True).encode("context", "question")
    assert CODEC.decode(ids[:boundary]) == "<user>context"
    assert CODEC.decode(ids[boundary:]) == "question</user><model>"
    assert BOS not in ids


def test_a_model_without_a_template_cannot_chat():
    tokenizer = Characters()
    tokenizer.chat_template = None
    with pytest.raises(SystemExit, match="no chat template"):
        Codec(tokenizer, chat=True)
