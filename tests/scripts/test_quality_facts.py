"""The trained tasks as prompts of eval_quality: what they ask is in their context, and only a model that knows its
words is asked."""

import pytest

from sglang_tailreplay.cpu import activate

activate()
transformers = pytest.importorskip("transformers")

from quality import facts, plan  # noqa: E402
from quality.codec import Codec  # noqa: E402
from quality_helpers import Characters  # noqa: E402
from train import checkpoint, loader, vocabulary  # noqa: E402


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoint.write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    return Codec.load(str(folder))


@pytest.mark.parametrize("task", facts.TASKS)
@pytest.mark.parametrize("length", [128, 1024])
def test_what_is_asked_is_in_the_context(task, length, codec):
    for index in range(3):
        prompt = facts.prompt(task, length, index, 0)
        context, question = codec.decode(prompt.ids[: prompt.boundary]), codec.decode(prompt.ids[prompt.boundary :])
        assert length - 6 <= len(prompt.ids) <= length - 3  # the answer has 3 to 6 tokens
        assert codec.encode(context, question).ids == prompt.ids
        assert all(reference in context for reference in prompt.references)
        assert question.startswith("trace it" if task == "vt" else "what is the code")
        assert len(prompt.references) == (4 if task == "vt" else 1)
        named = set(question.split()) & {vocabulary.WORDS[i] for i in vocabulary.NAME_IDS}
        assert bool(named) == (task == "niah_direct")


def test_prompts_depend_on_seed_and_index_and_are_not_from_training():
    digests = {facts.prompt("niah", 300, index, seed).digest for index in range(3) for seed in range(3)}
    assert len(digests) == 9
    assert facts.prompt("niah", 300, 1, 2) == facts.prompt("niah", 300, 1, 2)
    assert facts.EVALUATION != loader.TRAINING


def test_all_tasks_at_all_lengths_are_asked(codec):
    wanted = plan.Choice(("facts",), None, plan.MODES, (0.05,), ("question",), (200, 300), 2, 0)
    plan.check(wanted, codec)
    assert len({prompt.name for prompt in plan.prompts(wanted, codec, 0)}) == 2 * 2 * len(facts.TASKS)


def test_other_models_and_texts_that_are_too_short_are_refused(codec):
    for other in (None, Codec(Characters())):
        with pytest.raises(SystemExit, match="models of scripts/train_hybrid"):
            facts.check(other, (1024,))
    with pytest.raises(SystemExit, match="at least 128, not 64"):
        facts.check(codec, (1024, 64))
