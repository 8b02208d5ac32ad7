"""RULER-like tasks over token ids, for models without a text tokenizer: hybrids trained on a closed vocabulary of
markers, filler, keys and values, and random ones.

    bos, task, filler with units in it | ?, key, =>, answer       the context ends at the bar

A unit is `# key = value value ;` (niah, kv), `var key = key ;` (vt) or one key (cwe). Prompts have exactly the wanted
length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from quality.prompt import Prompt

BOS = 1
NIAH, KV, VT, CWE, KEY_IS, IS, END, ASK, ANSWER, VAR, COUNT = range(8, 19)
LEAST_VOCABULARY = 128
HOPS = 4
COMMON = 4


class Vocabulary(NamedTuple):
    """Half-open ranges of ids. The ids below `filler` are for markers and what the model itself reserves."""

    filler: range
    keys: range
    values: range

    @classmethod
    def of(cls, size: int) -> Vocabulary:
        """The shares of a vocabulary of 1,024: filler from 32, keys from 256, values from 640."""
        if size < LEAST_VOCABULARY:
            raise SystemExit(f"token-id tasks need a vocabulary of at least {LEAST_VOCABULARY}, this model has {size}")
        return cls(range(32, size // 4), range(size // 4, size * 5 // 8), range(size * 5 // 8, size))


class Example(NamedTuple):
    units: list[list[int]]
    ordered: bool  # the units must keep their order
    question: list[int]
    answer: list[int]


def pairs(draw: random.Random, words: Vocabulary, count: int) -> Example:
    keys = draw.sample(words.keys, min(count, len(words.keys)))
    of = {key: [draw.choice(words.values), draw.choice(words.values)] for key in keys}
    asked = draw.choice(keys)
    return Example([[KEY_IS, k, IS, *v, END] for k, v in of.items()], False, [asked], of[asked])


def niah(draw: random.Random, words: Vocabulary, length: int) -> Example:
    return pairs(draw, words, draw.randrange(1, 9))


def kv(draw: random.Random, words: Vocabulary, length: int) -> Example:
    """As many pairs as fit with as much filler: a state cannot hold them all."""
    return pairs(draw, words, max(4, length // 12))


def vt(draw: random.Random, words: Vocabulary, length: int) -> Example:
    """Chains k0 = v, k1 = k0, ...; the answer is the chain of its last key, back to the value."""
    chains = max(1, min(8, length // 128))
    names = draw.sample(words.keys, chains * HOPS)
    keys = [names[c * HOPS : (c + 1) * HOPS] for c in range(chains)]
    roots = [draw.choice(words.values) for _ in range(chains)]
    units = [[VAR, keys[c][h], IS, keys[c][h - 1] if h else roots[c], END] for h in range(HOPS) for c in range(chains)]
    c = draw.randrange(chains)
    return Example(units, True, keys[c][-1:], [*reversed(keys[c][:-1]), roots[c]])


def cwe(draw: random.Random, words: Vocabulary, length: int) -> Example:
    """Four keys that occur often among keys that occur about once; the answer names them in ascending order."""
    common = sorted(draw.sample(words.keys, COMMON))
    rare = [key for key in draw.choices(words.keys, k=max(4, length // 3)) if key not in common]
    listed = common * max(4, length // 48) + rare
    draw.shuffle(listed)
    return Example([[key] for key in listed[: max(1, length - 80)]], False, [COUNT], common)


TASKS: dict[str, tuple[int, Callable[[random.Random, Vocabulary, int], Example]]] = {
    "niah": (NIAH, niah),
    "kv": (KV, kv),
    "vt": (VT, vt),
    "cwe": (CWE, cwe),
}


def prompt(name: str, length: int, index: int, seed: int, vocab_size: int) -> Prompt:
    draw, words = random.Random(f"{seed}/ids/{name}/{length}/{index}"), Vocabulary.of(vocab_size)
    tag, make = TASKS[name]
    example = make(draw, words, length)
    question = [ASK, *example.question, ANSWER]
    room = length - len(question) - len(example.answer) - 2
    head = [BOS, tag]
    context = [*head, *spread(draw, words, example, room, f"ruler/{name}@{length}")]
    return Prompt(
        *("ruler", name, length, index, (*context, *question), len(context), len(example.answer)),
        references=(tuple(example.answer),),
        metric="same_ids",
        stops=False,
    )


def spread(draw: random.Random, words: Vocabulary, example: Example, room: int, cell: str) -> list[int]:
    """The units at random places of `room` tokens, filler between them. Units that do not fit are left out, but never
    those that the answer needs."""
    matters = {*example.question, *example.answer}
    units, used = list(example.units), sum(map(len, example.units))
    for at in reversed(range(len(units))):
        if used > room and not matters & set(units[at]) and example.question != [COUNT]:
            used -= len(units.pop(at))
    if used > room:
        raise SystemExit(f"{cell}: needs {used} tokens beside the question, {room} are there; raise --lengths")
    if not example.ordered:
        draw.shuffle(units)
    gaps = sorted(draw.randrange(room - used + 1) for _ in units)
    ids: list[int] = []
    filled = 0
    for gap, unit in zip(gaps, units, strict=True):
        ids += [draw.choice(words.filler) for _ in range(gap - filled)] + unit
        filled = gap
    return ids + [draw.choice(words.filler) for _ in range(room - len(ids))]
