"""Request traces without text: which blocks of tokens a prompt is made of, equal ids being equal prefixes.

Two public formats are read. Mooncake's JSONL, a request a line: {"timestamp": ms, "input_length", "output_length",
"hash_ids"} with blocks of 512 tokens. Coding-agent conversations, a file each: {"block_size", "requests": [{"t": s,
"in", "out", "hash_ids"}, ...]} with ids that hold within the file, and sub-agents as nested lists of requests."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MOONCAKE_BLOCK = 512


class Block(NamedTuple):
    """A block of a prompt. Equal keys and sizes: equal tokens, and equal tokens before them."""

    key: Hashable
    size: int


class Request(NamedTuple):
    seconds: float  # of arrival
    blocks: tuple[Block, ...]  # of the prompt, in order; only the last may be shorter than the others
    output: int  # new tokens

    @property
    def length(self) -> int:
        return sum(block.size for block in self.blocks)


def load(paths: Sequence[Path], block: int = MOONCAKE_BLOCK) -> list[Request]:
    """In the order of arrival. `block`: of JSONL files. ValueError names the file and line that is no request."""
    requests: list[Request] = []
    for number, path in enumerate(paths):
        requests += _conversation(path, number) if path.suffix == ".json" else _mooncake(path, number, block)
    return sorted(requests, key=lambda request: request.seconds)


def _mooncake(path: Path, number: int, block: int) -> Iterator[Request]:
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if text.strip():
            entry = json.loads(text)
            try:
                seconds, length, output = entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"]
                ids = [(number, key) for key in entry["hash_ids"]]
                yield Request(seconds, blocks(ids, length, block, (number, "line", line)), output)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{line}: no request ({error!r})") from None


def _conversation(path: Path, number: int) -> Iterator[Request]:
    document = json.loads(path.read_text())
    for place, (seconds, entry) in enumerate(_flat(document["requests"], 0.0)):
        try:
            ids = [(number, key) for key in entry["hash_ids"]]
            prompt = blocks(ids, entry["in"], document["block_size"], (number, "request", place))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: request {place}: no request ({error!r})") from None
        yield Request(seconds, prompt, entry["out"])


def _flat(entries: Sequence[Mapping[str, Any]], begin: float) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Requests with their absolute times; those of a sub-agent count from its start."""
    for entry in entries:
        seconds = begin + entry["t"]
        if "requests" in entry:
            yield from _flat(entry["requests"], seconds)
        else:
            yield seconds, entry


def blocks(ids: Sequence[Hashable], length: int, size: int, own: Hashable) -> tuple[Block, ...]:
    """A prompt of `length` tokens. A last part without an id gets the key `own`, which nothing shares."""
    cut = [Block(key, min(size, length - i * size)) for i, key in enumerate(ids)]
    if length < 1 or any(block.size < 1 for block in cut):
        raise ValueError(f"{len(ids)} blocks of {size} for {length} tokens")
    rest = length - len(ids) * size
    if rest >= size:
        raise ValueError(f"{len(ids)} blocks of {size} are too few for {length} tokens")
    return (*cut, Block(own, rest)) if rest > 0 else tuple(cut)
