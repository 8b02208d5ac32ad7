"""Texts with facts in them, and questions about the facts, over the closed vocabulary.

    <s> the wild tower keeps the wolf . the code of ada is blue castle . ...      facts among filler sentences
    consider ada . the tall ship sees the tiger .                                whom the question is about
    what is the code ? answer : blue castle </s>                                 the question, the answer

`niah` hides 1 to 8 facts, `kv` one per 32 tokens, `vt` chains of "bob copies ada ." that end at a code; its answer
names the whole chain: "trace it ? answer : ada blue castle". The question itself does not say whom it is about: a model
keeps that in the state of its recurrent layers, and finds the fact, far back, with attention. A direct question does.

One generator makes training sequences, with many questions each, and the prompts of an evaluation, with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train import vocabulary as words

TASKS = ("niah", "kv", "vt")
SHARES = (0.2, 0.4, 0.4)  # of training sequences
HOPS = 4  # names of a chain
MOST_GAP = 5  # filler sentences between the subject and the question
DIRECT_SHARE = 0.2  # of training questions that name their subject themselves
QUESTION_TOKENS = 40  # of a training sequence, for one question
MOST_QUESTIONS = 64  # of a training sequence

_THE, _STOP = words.ID["the"], words.ID["."]
_CODE_OF, _IS, _COPIES = words.ids("the code of"), words.ID["is"], words.ID["copies"]
_CONSIDER, _ANSWER = words.ID["consider"], words.ids("? answer :")
_WHAT, _WHAT_OF = words.ids("what is the code"), words.ids("what is the code of")
_TRACE, _IT = words.ID["trace"], words.ID["it"]


@dataclass(frozen=True)
class Facts:
    sentences: list[np.ndarray]
    answers: dict[int, np.ndarray]  # name -> what to answer when asked about it
    askable: np.ndarray  # [facts, names]: a fact, or chain, may be asked for by each of its names
    ordered: bool  # sentences must keep their order

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sentences))


class Question(NamedTuple):
    subject: np.ndarray  # tokens before the cut: "consider ada .", filler; empty for a direct question
    question: np.ndarray
    answer: np.ndarray


class Sample(NamedTuple):
    ids: np.ndarray  # [T]
    answers: np.ndarray  # [T] bool: tokens of answers
    task: int


def training_sample(rng: np.random.Generator, length: int) -> Sample:
    """A text of exactly `length` tokens with questions at its end. No fact is asked for twice, so that an answer cannot
    be copied from an earlier one."""
    number = int(rng.choice(len(TASKS), p=SHARES))
    task = TASKS[number]
    facts = make_facts(rng, task, length, dense=True)
    count = max(1, min(MOST_QUESTIONS, length // QUESTION_TOKENS, len(facts.askable)))
    parts, marks, room = [], [], length - facts.tokens - 1
    for names in rng.permutation(facts.askable)[:count]:
        gap = int(rng.integers(0, MOST_GAP + 1, 2).min()) if length > 128 else int(rng.integers(0, 2))
        name = names[-1] if rng.random() < 0.5 else rng.choice(names)
        asked = make_question(rng, facts, task, int(name), gap, rng.random() < DIRECT_SHARE)
        room -= sum(map(len, asked))
        if room < 0 and parts:
            break
        parts += asked
        marks += [np.zeros(len(asked.subject) + len(asked.question), bool), np.ones(len(asked.answer), bool)]
    end, mark = np.concatenate(parts), np.concatenate(marks)
    body = make_text(rng, facts, length - len(end))
    return Sample(np.concatenate([body, end]), np.concatenate([np.zeros(len(body), bool), mark]), number)


def asking_sample(
    rng: np.random.Generator, task: str, length: int, direct: bool = False
) -> tuple[np.ndarray, Question]:
    """(context, question): with the answer `length` tokens. The context ends with the question's subject; a chain is
    asked about from its end."""
    facts = make_facts(rng, task, length)
    name = int(rng.choice(facts.askable[:, -1]))
    asked = make_question(rng, facts, task, name, int(rng.integers(1, MOST_GAP)), direct)
    room = length - len(asked.question) - len(asked.answer) - len(asked.subject)
    return np.concatenate([make_text(rng, facts, room), asked.subject]), asked


# ---------------------------------------------------------------------------------------------------------- facts


def make_facts(rng: np.random.Generator, task: str, length: int, dense: bool = False) -> Facts:
    """`dense`: more chains than a person would be asked about, for training."""
    if task == "vt":
        return _chains(rng, max(1, min(len(words.NAME_IDS) // HOPS, length // 64) if dense else min(8, length // 96)))
    if task == "niah":
        return _codes(rng, int(rng.integers(1, max(1, min(8, length // 40)) + 1)))
    return _codes(rng, max(2, min(len(words.NAME_IDS) - 32, length // 32)))


def _codes(rng: np.random.Generator, count: int) -> Facts:
    names = rng.permutation(words.NAME_IDS)[:count]
    codes = _draw_codes(rng, count)
    sentences = [_code_fact(name, code) for name, code in zip(names, codes, strict=True)]
    answers = {int(n): _ended(c) for n, c in zip(names, codes, strict=True)}
    return Facts(sentences, answers, names[:, None], ordered=False)


def _chains(rng: np.random.Generator, most: int) -> Facts:
    """All first assignments, then all second ones, ..."""
    count = int(rng.integers(1, most + 1))
    names = rng.permutation(words.NAME_IDS)[: count * HOPS].reshape(count, HOPS)
    codes = _draw_codes(rng, count)
    sentences = [_code_fact(names[c, 0], codes[c]) for c in range(count)]
    for hop in range(1, HOPS):
        sentences += [np.array([names[c, hop], _COPIES, names[c, hop - 1], _STOP]) for c in range(count)]
    answers = {
        int(names[c, hop]): _ended(np.concatenate([names[c, :hop][::-1], codes[c]]))
        for c in range(count)
        for hop in range(1, HOPS)
    }
    return Facts(sentences, answers, names[:, 1:], ordered=True)


def _draw_codes(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.stack([rng.choice(words.CODE_ADJECTIVES, count), rng.choice(words.CODE_NOUNS, count)], 1)


def _code_fact(name: int, code: np.ndarray) -> np.ndarray:
    return np.array([*_CODE_OF, name, _IS, *code, _STOP])


def _ended(answer: np.ndarray) -> np.ndarray:
    return np.append(answer, words.EOS)


# ------------------------------------------------------------------------------------------------ questions, texts


def make_question(rng: np.random.Generator, facts: Facts, task: str, name: int, gap: int, direct: bool) -> Question:
    """`gap` filler sentences separate the subject from the question."""
    if task == "vt":
        question = [_TRACE, name if direct else _IT, *_ANSWER]
    else:
        question = [*_WHAT_OF, name, *_ANSWER] if direct else [*_WHAT, *_ANSWER]
    subject = [] if direct else [_CONSIDER, name, _STOP, *filler(rng, gap).ravel()]
    return Question(np.array(subject, np.int64), np.array(question, np.int64), facts.answers[name])


def filler(rng: np.random.Generator, count: int) -> np.ndarray:
    """[count, 7]: sentences like "the wild tower keeps the wolf ."."""

    def column(choices: np.ndarray) -> np.ndarray:
        return choices[rng.integers(len(choices), size=count)]

    the, stop = np.full(count, _THE), np.full(count, _STOP)
    parts = (the, column(words.ADJECTIVE_IDS), column(words.NOUN_IDS), column(words.VERB_IDS))
    return np.stack([*parts, the, column(words.NOUN_IDS), stop], 1)


def make_text(rng: np.random.Generator, facts: Facts, length: int) -> np.ndarray:
    """`length` tokens: all facts, each at a random place among filler; a first sentence may lack its beginning. Earlier
    subjects are among them where there is room: only the last one counts."""
    if facts.tokens + 1 > length:
        raise ValueError(f"the facts need {facts.tokens + 1} tokens, the text has room for {length}")
    order = np.arange(len(facts.sentences)) if facts.ordered else rng.permutation(len(facts.sentences))
    units = [facts.sentences[i] for i in order]
    spare = min(length // 128, (length - facts.tokens) // 16)
    for name in rng.choice(list(facts.answers), int(rng.integers(0, spare + 1))):
        units.insert(int(rng.integers(len(units) + 1)), np.array([_CONSIDER, name, _STOP]))
    sentences = filler(rng, -(-(length - 1 - sum(map(len, units))) // 7))
    places = np.sort(rng.integers(min(1, len(sentences)), len(sentences) + 1, len(units)))
    parts, begin = [], 0
    for unit, place in zip(units, places, strict=True):
        parts += [sentences[begin:place].ravel(), unit]
        begin = place
    body = np.concatenate([*parts, sentences[begin:].ravel()])
    return np.concatenate([[words.BOS], body[len(body) - (length - 1) :]])
