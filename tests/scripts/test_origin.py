"""Which commit a result is of, and whether the checkout had changes: never a guess."""

from argparse import Namespace

import origin
import pytest


@pytest.mark.parametrize(
    ("given", "head", "changed", "expected"),
    [
        (None, "abc1", "", {"commit": "abc1", "dirty": False}),
        (None, "abc1", " M file", {"commit": "abc1", "dirty": True}),
        ("abc", "abc1", "", {"commit": "abc", "dirty": False}),
        ("abc", "fff9", "?? everything", {"commit": "abc", "dirty": None}),  # a copy with another history
        ("abc", None, None, {"commit": "abc", "dirty": None}),
    ],
)
def test_a_commit_is_clean_only_where_git_says_so(monkeypatch, given, head, changed, expected):
    monkeypatch.setattr(origin, "first_output", lambda *command: head if "rev-parse" in command else changed)
    assert origin.commit_of(Namespace(commit=given)) == expected
