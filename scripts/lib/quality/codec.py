"""Texts to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_CONTENT = "<<<content>>>"  # survives any chat template


class Encoded(NamedTuple):
    ids: tuple[int, ...]
    boundary: int  # tokens of the context


def has_tokenizer(folder: Path) -> bool:
    """Whether a local model folder brings a tokenizer; a name that is no folder is taken for a model hub's."""
    return not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES)


class Codec:
    """Context and question are tokenised apart, so that the context's tokens do not depend on the question.

    With `chat`, the model's chat template is put around them, its reasoning switched off where it has a switch."""

    def __init__(self, tokenizer: Any, chat: bool = False):
        self.tokenizer = tokenizer
        self.before, self.after = _template(tokenizer) if chat else ("", "")
        self._adds_special = not chat  # a template writes its own

    @classmethod
    def load(cls, model_path: str, chat: bool = False) -> Codec:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model_path), chat)

    def encode(self, context: str, question: str, body: str = "", budget: int | None = None) -> Encoded:
        """`body` is the last part of the context; it loses its middle where all would be more than `budget` tokens."""
        head = self._ids(self.before + context, self._adds_special)
        middle, tail = self._ids(body), self._ids(question + self.after)
        if budget is not None:
            middle = without_middle(middle, max(0, budget - len(head) - len(tail)))
        return Encoded((*head, *middle, *tail), len(head) + len(middle))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _ids(self, text: str, special: bool = False) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] if text else []


def without_middle(ids: list[int], most: int) -> list[int]:
    """The first and the last tokens: at most `most` of them."""
    if len(ids) <= most:
        return ids
    return ids[: (most + 1) // 2] + ids[len(ids) - most // 2 :]


def _template(tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise SystemExit("--chat: the tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": _CONTENT}]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    before, found, after = tokenizer.apply_chat_template(messages, **options).partition(_CONTENT)
    if not found:
        raise SystemExit("--chat: the chat template changes a message's text; leave --chat out")
    return before, after
