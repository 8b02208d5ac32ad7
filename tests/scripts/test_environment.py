"""A program whose Python lacks what it needs goes on in .venv, and never comes back here for it."""

import sys

import environment
import pytest


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What is started, with a checkout whose .venv is nowhere near."""
    made = []
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    monkeypatch.setattr(environment.subprocess, "call", lambda command: made.append(command) or 0)
    monkeypatch.setattr(environment.os, "execv", lambda *command: made.append(command))
    return made


def test_a_python_that_has_it_is_kept(calls):
    environment.enter("json", "math")
    assert calls == []


def test_another_one_is_left_with_the_same_arguments(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["scripts/soak", "--seconds", "3"])
    environment.enter("json", "no_such_module")
    python = str(tmp_path / ".venv" / "bin" / "python")
    assert calls == [[str(tmp_path / "scripts" / "setup")], (python, [python, "scripts/soak", "--seconds", "3"])]


def test_a_setup_that_fails_is_the_end(calls, monkeypatch):
    monkeypatch.setattr(environment.subprocess, "call", lambda command: 7)
    with pytest.raises(SystemExit) as stop:
        environment.enter("no_such_module")
    assert stop.value.code == 7 and calls == []


def test_an_environment_without_it_is_not_entered_over_and_over(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    environment.enter("no_such_module")
    assert calls == []
