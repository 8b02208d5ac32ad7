"""Chats with a reasoning model: thinking is stripped from the history, last messages are edited, answers regenerated.

Every one of these leaves the cached conversation somewhere in the middle, or sends a whole prompt again."""

from __future__ import annotations

from functools import partial

from client import Client
from load import Load

CHATS = 4
SYSTEM, QUESTION = 3000, 400


def strip_thinking(answer: list[int]) -> list[int]:
    """The first half of an answer is its thinking."""
    return answer[len(answer) // 2 :]


def converse(client: Client, load: Load, chat: int) -> None:
    history = load.text("system", SYSTEM)
    for turn in range(load.rounds):
        question = load.text(f"{chat}/question/{turn}", QUESTION)
        answer = client.generate(history + question).tokens
        if turn % 3 == 1:  # the user is not happy and asks for another answer: the same prompt
            answer = client.generate(history + question).tokens
        if turn % 3 == 2:  # or edits the end of the message
            question = question[: len(question) // 2] + load.text(f"{chat}/edit/{turn}", QUESTION / 2)
            answer = client.generate(history + question).tokens
        history = history + question + strip_thinking(answer)


def run(client: Client, load: Load) -> None:
    """Chats go on beside each other."""
    client.together([partial(converse, client, load, chat) for chat in range(CHATS)], load.concurrency)
