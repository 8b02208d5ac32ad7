"""The one error that an operator sees."""

import argparse
from typing import NoReturn


class TailReplayError(ValueError):
    """A setting, model or environment that Tail-Replay does not support; the message names it and the way out."""


class Refused(TailReplayError):
    """A start that will not do, with every problem that was found; the message is the first one."""

    def __init__(self, problems: list[str]):
        super().__init__(problems[0])
        self.problems = problems


class Parser(argparse.ArgumentParser):
    """A flag that does not parse is a bad setting like any other."""

    def error(self, message: str) -> NoReturn:
        raise TailReplayError(message)
