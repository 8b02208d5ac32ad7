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


def test_a_machine_without_a_gpu_is_told_before_an_engine_fails(monkeypatch):
    monkeypatch.setattr(origin, "first_output", lambda *command: None)
    with pytest.raises(SystemExit, match="no GPU"):
        origin.need_gpu(origin.machine())
    monkeypatch.setattr(origin, "first_output", lambda *command: "NVIDIA H200, 580.159.04, 143771 MiB")
    origin.need_gpu(origin.machine())
