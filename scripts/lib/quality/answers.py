"""Every answer of a run, in a file of JSON lines that a later call goes on from.

The first line says under which settings the answers were given; they may not change within a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FULL, AGAIN, ZERO, SEEDED = "full", "again", "zero", "seeded"
COLD = (FULL, AGAIN)  # nothing is cached; AGAIN: on another server, whose passes are of other sizes


def replay(ratio: float) -> str:
    return f"r={ratio:g}"


def tail(tokens: int) -> str:
    return f"k={tokens}"


def plain(ratio: float) -> str:
    """The tail is prefilled as ordinary tokens, from zero states: no rows."""
    return f"plain={ratio:g}"


def anchored(interval: int) -> str:
    return f"anchored={interval}"


def ratio_of(variant: str) -> float | None:
    return _number(variant, "r")


def tail_of(variant: str) -> int | None:
    found = _number(variant, "k")
    return None if found is None else int(found)


def plain_of(variant: str) -> float | None:
    return _number(variant, "plain")


def anchored_of(variant: str) -> int | None:
    found = _number(variant, "anchored")
    return None if found is None else int(found)


def _number(variant: str, kind: str) -> float | None:
    name, _, number = variant.partition("=")
    return float(number) if name == kind else None


@dataclass(frozen=True)
class Key:
    """What an answer is an answer to. Cold prefill knows no cut."""

    prompt: str  # Prompt.name
    cut: str | None
    variant: str


@dataclass(frozen=True)
class Answer:
    prompt: str
    cell: str
    cut: str | None
    variant: str
    digest: str  # Prompt.digest
    tokens: int  # of the prompt
    boundary: int  # where the cached prefix ended
    cached: int
    replayed: int
    generation: int
    output: list[int]
    text: str | None  # None where the model has no text
    score: float
    seconds: float
    start: str = ""  # how the replay began: exact, seeded or zero

    @property
    def key(self) -> Key:
        return Key(self.prompt, self.cut, self.variant)


class AnswersDiffer(RuntimeError):
    """The file holds answers that this run may not be mixed with."""


class AnswerFile:
    """Safe to append to from many threads. A line that a killed run left half written is dropped."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path, self._lock = path, threading.Lock()
        self.answers: dict[Key, Answer] = {}
        whole = _whole_lines(path)
        if whole:
            self._check(json.loads(whole[0])["settings"], json.loads(json.dumps(settings)))
            for line in whole[1:]:
                answer = Answer(**json.loads(line))
                self.answers[answer.key] = answer
            self._file = path.open("a")
        else:
            self._file = path.open("w")
            self._write({"settings": dict(settings)})

    def _check(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        for name in sorted({*theirs, *ours}):
            if theirs.get(name) != ours.get(name):
                raise AnswersDiffer(
                    f"{self.path}: its answers were given with {name}={theirs.get(name)!r}, this run has "
                    f"{ours.get(name)!r}; choose another --out, or the old setting"
                )

    def find(self, key: Key, digest: str) -> Answer | None:
        """The answer to go on from. AnswersDiffer if it answers another prompt of that name."""
        answer = self.answers.get(key)
        if answer is not None and answer.digest != digest:
            raise AnswersDiffer(
                f"{self.path}: {key.prompt} is another prompt now (other data, tokenizer or version); "
                "choose another --out"
            )
        return answer

    def add(self, answer: Answer) -> None:
        with self._lock:
            self.answers[answer.key] = answer
            self._write(asdict(answer))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a file; what follows the last line feed is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return data[:end].decode().splitlines() if end else []
