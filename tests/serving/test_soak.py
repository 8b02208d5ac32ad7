"""scripts/soak as an operator runs it, for a short time: a server too small for its load, on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "scripts" / "soak"


@pytest.fixture(scope="module")
def crowded(serve_tiny):
    """So few tokens of KV that eviction and retraction never stop."""
    small = ("--max-total-tokens", "900", "--context-length", "320", "--chunked-prefill-size", "64")
    small += ("--max-running-requests", "6", "--mem-fraction-static", "0.2", "--sleep-on-idle")
    small += ("--schedule-conservativeness", "0.1")  # admit more than fits, so that some are retracted
    flags = ("--enable-metrics", "--enable-cache-report", "--tail-replay-min-tokens", "4")
    flags += ("--tail-replay-verify-fraction", "0.5")  # it must give way to whatever comes, and leave nothing behind
    # Makes SGLang retract every few steps, however slow the machine is.
    with serve_tiny(*flags, small=small, SGLANG_TEST_RETRACT="1") as server:
        yield server


def test_rounds_of_everything(crowded, tmp_path):
    """As many rounds on a busy machine as on an idle one, where they take some fifteen seconds."""
    out = tmp_path / "soak.json"
    command = [sys.executable, SOAK, "--url", crowded.base_url, "--server-pid", crowded.process.pid, "--out", out]
    command += ["--seconds", 120, "--rounds", 9, "--concurrency", 8, "--max-prompt", 160, "--max-new", 96, "--seed", 1]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + crowded.log_tail()
    report = json.loads(out.read_text())
    assert report["ok"] and report["compared"] == "tokens" and report["metrics_watched"] and report["memory_watched"]
    assert report["retractions"] > 0
    assert report["of_them_hits"] >= 5, "nothing was proved: hardly any hit was compared"
    assert report["rounds"] >= 6 and report["kinds"].keys() >= {"burst", "fan", "malformed", "too-long", "abort"}


@pytest.mark.slow
def test_a_killed_scheduler_is_heard_of_and_the_next_start_is_clean(tiny_model, tmp_path):
    """Starts two servers of its own; tests/scripts/test_soak_restart.py shows what would be found."""
    out = tmp_path / "soak.json"
    command = [sys.executable, SOAK, "--model-path", tiny_model, "--seconds", 5, "--kill", "--max-prompt", 160]
    command += ["--max-new", 64, "--concurrency", 8, "--out", out, "--log", tmp_path / "log"]
    command += ["--", "--dtype", "float32", "--tail-replay-min-tokens", 4, "--mem-fraction-static", 0.2]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and "starting again" in done.stderr, done.stderr[-4000:]
