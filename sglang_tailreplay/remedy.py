"""The start that was meant: an operator's flags without those that stand in its way."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from sglang_tailreplay import compat

KEPT = "--model-path"


def without_named(flags: Sequence[str], problems: Sequence[str]) -> list[str]:
    """The flags, with their values, that no problem names. SGLang's other names of a flag count as the same."""
    named = {_canonical(flag) for text in problems for flag in re.findall(r"--[a-zA-Z][\w-]*", text)}
    kept, dropped = [], False
    for word in flags:
        if re.match("--?[a-zA-Z]", word):  # a flag, not a value like -1
            flag = _canonical(word.split("=")[0])
            dropped = flag in named and flag != _canonical(KEPT)
        if not dropped:
            kept.append(word)
    return kept


def _canonical(flag: str) -> str:
    """Where SGLang's parser puts the value of a flag, which may be cut short; the flag itself where it knows none."""
    actions = _actions()
    begun = {action.dest for name, action in actions.items() if name.startswith(flag)}
    if flag in actions:
        return actions[flag].dest
    return begun.pop() if len(begun) == 1 else flag


@functools.cache
def _actions() -> dict[str, Any]:
    """Every flag of SGLang's parser, which takes a while to make."""
    parser, _, _ = compat.parse_arguments([KEPT, "M"])
    return parser._option_string_actions
