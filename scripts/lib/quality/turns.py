"""Conversations over one text: every turn asks about another of its facts. Tokens, from seeds.

    text, subject | question answer, subject | question answer, ...        a turn's cut is at its bar

In the tasks over words (train/tasks.py) the question does not say whom it is about, so that the states at the cut
matter; the subject is said before it. In those over token ids (id_tasks.py) the states hold facts of the text, and
nothing is said. The answers in the history are the right ones, so that all variants are asked the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from train import tasks, vocabulary

from quality import facts, id_tasks
from quality.prompt import Prompt

TRIES = 500  # to draw a text with enough facts
WORD_TASKS, ID_TASKS = ("niah", "kv", "vt"), ("niah", "kv", "vt")


class Turn(NamedTuple):
    cut: int  # tokens before the question
    prompt: Prompt


@dataclass(frozen=True)
class Conversation:
    name: str
    turns: tuple[Turn, ...]


class _Asked(NamedTuple):
    said: Sequence[int]  # before the cut
    question: Sequence[int]
    answer: Sequence[int]  # to what the model is trained to say, its end included
    references: tuple


def over_words(task: str, length: int, turns: int, index: int, seed: int) -> Conversation:
    """`length`: tokens before the first question."""
    rng = np.random.default_rng([facts.EVALUATION, seed, 1 + WORD_TASKS.index(task), length, index, turns])
    found = next(
        (made for _ in range(TRIES) if len((made := tasks.make_facts(rng, task, length)).askable) >= turns), None
    )
    if found is None:
        raise SystemExit(f"{task}: a text of {length} tokens has no {turns} facts to ask for; fewer --turns")
    chosen = rng.permutation(found.askable[:, -1])[:turns]
    asked = [
        tasks.make_question(rng, found, task, int(name), int(rng.integers(1, tasks.MOST_GAP)), False) for name in chosen
    ]
    text = tasks.make_text(rng, found, length - len(asked[0].subject)).tolist()
    parts = [_Asked(q.subject.tolist(), q.question.tolist(), q.answer.tolist(), _named(q.answer)) for q in asked]
    return _build("facts", task, length, index, text, parts, facts.NEW_TOKENS, "all_found", stops=True)


def _named(answer: np.ndarray) -> tuple[str, ...]:
    *names, adjective, noun, _ = answer
    return (*(vocabulary.text([one]) for one in names), vocabulary.text([adjective, noun]))


def over_ids(task: str, length: int, turns: int, index: int, seed: int, vocab_size: int) -> Conversation:
    draw, words = random.Random(f"{seed}/turns/{task}/{length}/{index}"), id_tasks.Vocabulary.of(vocab_size)
    tag, make = id_tasks.TASKS[task]
    for _ in range(TRIES):
        example = make(draw, words, length)
        if len(answers := _answers(task, example.units)) >= turns:
            break
    else:
        raise SystemExit(f"{task}: a text of {length} tokens has no {turns} facts to ask for; fewer --turns")
    asked = [(key, answers[key]) for key in draw.sample(sorted(answers), turns)]
    body = id_tasks.spread(draw, words, example, length - 2, f"turns/{task}@{length}")
    context = [id_tasks.BOS, tag, *body]
    parts = [_Asked((), (id_tasks.ASK, key, id_tasks.ANSWER), answer, (tuple(answer),)) for key, answer in asked]
    return _build("ruler", task, length, index, context, parts, len(parts[0].answer), "same_ids", stops=False)


def _answers(task: str, units: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """What to answer to each key that may be asked for."""
    if task != "vt":
        return {key: list(values) for _, key, _, *values, _ in units}
    before = {key: value for _, key, _, value, _ in units}
    found = {}
    for last in set(before) - set(before.values()):
        chain = [before[last]]
        while chain[-1] in before:
            chain.append(before[chain[-1]])
        found[last] = chain
    return found


def _build(
    benchmark: str,
    task: str,
    length: int,
    index: int,
    text: Sequence[int],
    asked: Sequence[_Asked],
    new_tokens: int,
    metric: str,
    stops: bool,
) -> Conversation:
    ids, turns = list(text), []
    for one in asked:
        ids += one.said
        cut = len(ids)
        ids += one.question
        turns.append(
            Turn(
                cut,
                Prompt(benchmark, task, length, index, tuple(ids), cut, new_tokens, one.references, metric, stops),
            )
        )
        ids += one.answer
    return Conversation(turns[0].prompt.name, tuple(turns))
