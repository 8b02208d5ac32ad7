"""The closed vocabulary: words that a person can read, one token each.

Words of codes, of filler and of names are disjoint, so that a code in an answer can only come from a fact."""

from __future__ import annotations

import numpy as np
from quality.words import ADJECTIVES, NOUNS

SPECIAL = ("<unk>", "<s>", "</s>")
UNKNOWN, BOS, EOS = range(3)
GRAMMAR = ". : ? the code of is copies consider what trace it answer".split()
NAMES = """ada adam agnes alan albert alex alice amy andrew angela anita anna anton arthur barbara ben bernard beth
betty bob boris brenda brian bruce carl carla carlos cecil celia chris clara claude clive colin cora dan dave david
dean derek diana dick dora doris earl eddie edgar edith edwin elena elias ella ellen elmer elsa emil emily emma
eric erika ernest esther ethan eva felix fiona flora frank fred gary george gerald gilbert gina gloria gordon
grace greta gustav hannah harold harry hector helen henry herman hilda hugo ian ida igor ines irene iris isaac
ivan jack jacob jane janet jason jean jenny jerry jim joan joe john judy julia karen karl kate keith ken kevin
klara kurt larry laura lena leo leon linda lisa lola louis lucas lucy luis lydia mabel marco maria mark martha
martin mary max mia mike mona nancy nathan nell nick nina noah nora norman olga oliver oscar otto pamela paul
paula peter philip phoebe quentin rachel ralph ray rita robert rosa roy""".split()
VERBS = """admires avoids builds carries cleans closes counts covers draws finds follows guards holds keeps likes meets
moves needs opens paints passes pulls pushes reaches reads repairs sees shows takes touches visits watches""".split()

CODE_WORDS = 64  # of each kind; the words after them are filler
FILLER_ADJECTIVES, FILLER_NOUNS, FILLER_VERBS = 24, 40, 32
NAME_COUNT = 160

_PARTS = (
    SPECIAL,
    GRAMMAR,
    NAMES[:NAME_COUNT],
    ADJECTIVES[:CODE_WORDS],
    NOUNS[:CODE_WORDS],
    ADJECTIVES[-FILLER_ADJECTIVES:],
    NOUNS[-FILLER_NOUNS:],
    VERBS[:FILLER_VERBS],
)
WORDS = tuple(word for part in _PARTS for word in part)
SIZE = 448  # of the embedding: a multiple of 64
ID = {word: i for i, word in enumerate(WORDS)}
if len(ID) != len(WORDS) or len(WORDS) > SIZE:
    raise AssertionError(f"{len(WORDS)} words, {len(ID)} different ones, room for {SIZE}")


def _range(part: int) -> np.ndarray:
    start = sum(map(len, _PARTS[:part]))
    return np.arange(start, start + len(_PARTS[part]))


NAME_IDS, CODE_ADJECTIVES, CODE_NOUNS, ADJECTIVE_IDS, NOUN_IDS, VERB_IDS = map(_range, range(2, 8))


def ids(text: str) -> np.ndarray:
    """Token ids of words separated by spaces. KeyError for a word that is not in the vocabulary."""
    return np.array([ID[word] for word in text.split()], np.int64)


def text(tokens) -> str:
    return " ".join(WORDS[token] for token in tokens)
