"""RULER's tasks as texts: needles, variable tracking, common and frequent words, questions over documents.

Made after the public definitions of the tasks, with this project's own words: absolute scores are not those of another
harness. A task is a function of a seed and a size; fill() finds the size at which the prompt has the wanted length."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quality import words
from quality.codec import Codec
from quality.prompt import DoesNotFit, Prompt, fill


class Example(NamedTuple):
    context: str
    question: str  # with the first words of the answer
    references: tuple[str, ...]


class Document(NamedTuple):
    text: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]  # question, accepted answers


@dataclass(frozen=True)
class Material:
    """What the user may bring."""

    sentences: Sequence[str] = words.NOISE
    documents: tuple[Document, ...] = ()


class Task(NamedTuple):
    make: Callable[[str, int, Material, int], Example]  # seed, size, material, length in tokens
    new_tokens: int
    metric: str


def prompt(name: str, length: int, index: int, seed: int, codec: Codec, material: Material) -> Prompt:
    """One prompt that with its answer has `length` tokens or just below."""
    task, key = TASKS[name], f"{seed}/{name}/{length}/{index}"

    def build(size: int) -> Any:
        example = task.make(key, size, material, length)
        return example, codec.encode(example.context, example.question)

    most = len(material.documents) - 1 if name == "qa" else None
    try:
        _, (example, encoded) = fill(build, lambda built: len(built[1].ids), length - task.new_tokens, most)
    except DoesNotFit as error:
        raise SystemExit(
            f"ruler/{name}@{length}: {error} beside {task.new_tokens} for the answer; raise --lengths"
        ) from None
    ids, boundary = encoded
    return Prompt("ruler", name, length, index, ids, boundary, task.new_tokens, example.references, task.metric)


# -------------------------------------------------------------------------------------------------------- needles


class Needles(NamedTuple):
    keys: int = 1
    values: int = 1  # of each key
    asked: int = 1
    dense: bool = False  # the haystack is made of other needles


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10**6, 10**7))


def _needle(key: str, value: str) -> str:
    return f"One of the secret numbers for {key} is: {value}."


def niah(spec: Needles) -> Callable[[str, int, Material, int], Example]:
    def make(seed: str, size: int, material: Material, length: int) -> Example:
        draw, filler = random.Random(seed), random.Random(f"{seed}/filler")
        keys = words.distinct(draw, spec.keys, words.compound)
        numbers = words.distinct(draw, spec.keys * spec.values, _number)
        of = {key: tuple(numbers[i :: spec.keys]) for i, key in enumerate(keys)}
        needles = [_needle(key, value) for key in keys for value in of[key]]
        hay = _other_needles(filler, keys, size) if spec.dense else words.haystack(filler, material.sentences, size)
        asked = keys[: spec.asked]
        text = " ".join(words.scatter(draw, needles, hay))
        what = f"the secret numbers for {_listed(asked)}"
        return Example(
            f"Secret numbers are hidden in this text. Remember them: you will be asked about them.\n\n{text}\n\n",
            f"Question: What are all {what} that the text above mentions?\nAnswer: In the text, {what} are",
            tuple(value for key in asked for value in of[key]),
        )

    return make


def _other_needles(draw: random.Random, taken: Sequence[str], count: int) -> list[str]:
    keys = ((words.compound(draw), _number(draw)) for _ in range(count))
    return [_needle(key if key not in taken else f"{key}-two", value) for key, value in keys]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ------------------------------------------------------------------------------------- tracking and counting words


def with_example(make: Callable[[str, int, Material, int], Example], size: int):
    """Puts a small solved example before the text, as RULER does for tasks whose form has to be shown."""

    def shown(seed: str, n: int, material: Material, length: int) -> Example:
        first = make(f"{seed}/example", size, material, 0)
        context, question, references = make(seed, n, material, length)
        return Example(
            f"{first.context}{first.question} {' '.join(first.references)}\n\n{context}", question, references
        )

    return shown


HOPS = 4


def variable_tracking(seed: str, size: int, material: Material, length: int) -> Example:
    draw, filler = random.Random(seed), random.Random(f"{seed}/filler")
    names = words.distinct(draw, HOPS + 1, lambda d: "".join(d.choices(string.ascii_uppercase, k=5)))
    value = str(draw.randrange(10**4, 10**5))
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {name} = VAR {before}." for before, name in zip(names, names[1:], strict=False)]
    text = " ".join(words.scatter(draw, chain, words.haystack(filler, material.sentences, size), ordered=True))
    return Example(
        f"Follow the assignments of variables in the following text.\n\n{text}\n\n",
        f"Question: Which variables have the value {value}, directly or through another variable?\n"
        f"Answer: {len(names)} variables have the value {value}:",
        tuple(names),
    )


COMMON = 10


def common_words(seed: str, size: int, material: Material, length: int) -> Example:
    """Ten words that occur often among `size` that occur seldom; fewer times in a short prompt."""
    often, seldom = (30, 3) if length >= 4096 else (10, 1) if length >= 2560 else (4, 1)
    draw = random.Random(seed)
    chosen = words.plain_words(draw, COMMON + size)
    common, rare = chosen[:COMMON], chosen[COMMON:]
    listed = common * often + rare * seldom
    draw.shuffle(listed)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    return Example(
        f"Some words of the following numbered list occur more often than the others. Count them.\n\n{text}\n\n",
        f"Question: Which {COMMON} words are the most frequent in the list above?\nAnswer: The {COMMON} words are:",
        tuple(common),
    )


CODED = 3
CODED_VOCABULARY = 2000
ZIPF = 2.0


def frequent_words(seed: str, size: int, material: Material, length: int) -> Example:
    """Made-up words; the one of rank r is about r^-2 of them, and dots have rank 1. From 80 words on, no two of the
    ranks asked for occur equally often."""
    draw = random.Random(seed)
    coded = words.distinct(draw, CODED_VOCABULARY, lambda d: "".join(d.choices(string.ascii_lowercase, k=6)))
    shares = [rank**-ZIPF for rank in range(1, CODED_VOCABULARY + 1)]
    counts = [int((size + 80) * share / sum(shares)) for share in shares]
    text = [word for word, count in zip(["...", *coded], counts, strict=False) for _ in range(count)]
    draw.shuffle(text)
    return Example(
        f"Find the most frequent words of the following coded text. The dots are no words.\n\n{' '.join(text)}\n\n",
        f"Question: Which {CODED} words, dots aside, are the most frequent in the coded text above?\n"
        f"Answer: The {CODED} most frequent words are:",
        tuple(coded[:CODED]),
    )


# ----------------------------------------------------------------------------------------------------- documents


def qa(seed: str, size: int, material: Material, length: int) -> Example:
    """A question about one document among `size` others. The questions are taken in a shuffled order, one per index."""
    run, _, index = seed.rpartition("/")
    asked = [(i, *question) for i, document in enumerate(material.documents) for question in document.questions]
    random.Random(run).shuffle(asked)
    gold, question, answers = asked[int(index) % len(asked)]
    draw = random.Random(seed)
    others = [i for i in range(len(material.documents)) if i != gold]
    draw.shuffle(others)
    shown = [gold, *others[:size]]
    draw.shuffle(shown)
    text = "\n\n".join(f"Document {n}:\n{material.documents[i].text}" for n, i in enumerate(shown, start=1))
    return Example(
        f"Answer a question from the following documents, in a few words.\n\n{text}\n\n",
        f"Question: {question}\nAnswer:",
        answers,
    )


def read_documents(path: Path) -> tuple[Document, ...]:
    """Paragraphs of a SQuAD-like file, {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]};
    questions without an answer are left out. SystemExit for anything else."""
    try:
        paragraphs = [p for article in json.loads(path.read_text())["data"] for p in article["paragraphs"]]
        found: dict[str, list] = {}
        for paragraph in paragraphs:
            asked = found.setdefault(paragraph["context"], [])
            for one in paragraph["qas"]:
                if answers := tuple(dict.fromkeys(answer["text"] for answer in one["answers"])):
                    asked.append((one["question"], answers))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--qa-file {path}: not a file in SQuAD's format ({error!r})") from None
    if not any(found.values()):
        raise SystemExit(f"--qa-file {path}: no question in it has an answer")
    return tuple(Document(text, tuple(asked)) for text, asked in found.items())


TASKS = {
    "niah_single": Task(niah(Needles()), 48, "all_found"),
    "niah_multikey": Task(niah(Needles(keys=4)), 48, "all_found"),
    "niah_multikey_dense": Task(niah(Needles(dense=True)), 48, "all_found"),
    "niah_multivalue": Task(niah(Needles(values=4)), 96, "all_found"),
    "niah_multiquery": Task(niah(Needles(keys=4, asked=4)), 96, "all_found"),
    "vt": Task(with_example(variable_tracking, 3), 40, "all_found"),
    "cwe": Task(with_example(common_words, 10), 96, "all_found"),
    "fwe": Task(frequent_words, 50, "all_found"),
    "qa": Task(qa, 32, "any_found"),
}
