"""The limits of an engine: one for its start, which depends on the machine, one for what it is asked."""

import subprocess
import sys

import pytest
from engine_process import Limits, wait

WRITE = "import json, pathlib, sys, time; p = pathlib.Path(sys.argv[1])\n"
NOT_READY = WRITE + "p.write_text('{\"start_seconds\": null}'); time.sleep({rest})"
READY = WRITE + "time.sleep(0.5); p.write_text('{{\"start_seconds\": 0.5}}'); time.sleep({rest})"


@pytest.fixture
def run(tmp_path):
    """run(code, limits) -> how it ended; the child is gone afterwards."""

    def go(code, limits):
        child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out.json"])
        try:
            return wait(child, tmp_path / "out.json", limits)
        finally:
            child.kill()
            child.wait()

    return go


def test_an_engine_that_ends_by_itself(run):
    assert run("raise SystemExit(3)", Limits(30, 30)) == "exit code 3"


def test_a_start_that_takes_too_long(run):
    assert run(NOT_READY.replace("{rest}", "60"), Limits(1, 60)) == "killed at the limit of 1 s for its start"


def test_a_slow_start_leaves_the_work_its_time(run):
    assert run(READY.format(rest=1), Limits(30, 20)) == "exit code 0"
    assert run(READY.format(rest=60), Limits(30, 1)) == "killed at the limit of 1 s for its work"


def test_the_total_bounds_both(run):
    assert run(READY.format(rest=60), Limits(30, 60, total=2)) == "killed at the limit of 2 s"


def test_an_outcome_that_is_half_written_is_not_ready(run):
    code = WRITE + "p.write_text('{\"start'); time.sleep(60)"
    assert run(code, Limits(1, 60)).endswith("for its start")
