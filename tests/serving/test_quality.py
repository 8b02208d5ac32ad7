"""scripts/eval_quality on real servers: all modes over the same prompts, going on from what is there, and a replay that
is broken on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "eval_quality.py"
SERVER = (
    *("--dtype", "float32", "--max-total-tokens", "4096", "--context-length", "1024", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "4", "--max-mamba-cache-size", "16", "--sleep-on-idle"),
)
FLOAT32 = ("--server-env", "SGLANG_MAMBA_CONV_DTYPE=float32")


def evaluate(model, out, *given, url=None):
    command = [sys.executable, SCRIPT, "--model-path", model, "--out", out, "--ready-seconds", "240", *given]
    command += ["--url", url] if url else [*FLOAT32, "--", *SERVER]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = list(map(str, command))
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)


def answers_in(out):
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return lines[1:]


def outputs(answers, variant, cut=None):
    return {a["prompt"]: a["output"] for a in answers if a["variant"] == variant and a["cut"] == cut}


@pytest.fixture(scope="module")
def longbench(tmp_path_factory):
    """One record in LongBench's format."""
    folder = tmp_path_factory.mktemp("longbench")
    context = "The keeper of the lamp is Ada. " + "The sea is calm. " * 15
    record = {"input": "Who keeps the lamp?", "context": context, "answers": ["Ada"], "length": 60}
    (folder / "hotpotqa.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_all_modes_over_the_same_prompts(tiny_model, tmp_path, longbench):
    given = ("--benchmarks", "ruler,longbench", "--tasks", "niah_single,hotpotqa", "--longbench-dir", longbench)
    given += ("--lengths", "480", "--count", "1", "--ratios", "0.05,1", "--modes", "full,again,zero,plain,replay")
    done = evaluate(tiny_model, tmp_path, *given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = answers_in(tmp_path)
    full = outputs(answers, "full")
    assert len(full) == 2
    for cut in ("question", "random"):
        assert outputs(answers, "r=1", cut) == full  # in float32 a replay of all rows is a full prefill
        assert outputs(answers, "r=0.05", cut) != full  # and on this model, one of few is not
        assert outputs(answers, "zero", cut) != full
        assert outputs(answers, "zero", cut).keys() == outputs(answers, "r=0.05", cut).keys() == full.keys()
    assert outputs(answers, "again") == outputs(answers, "plain=1", "question") == full
    assert outputs(answers, "plain=0.05", "question") != full
    assert all(a["cached"] == a["boundary"] for a in answers)
    assert "LB-hotpotqa@480" in (tmp_path / "report.md").read_text()

    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("server-*.log"))]
    again = evaluate(tiny_model, tmp_path, *given)
    assert again.returncode == 0 and "20 of 20 answers" in again.stdout
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("server-*.log"))] == stamps  # none was started
    assert answers_in(tmp_path) == answers


BROKEN = """
import os

def register():
    import numpy
    from sglang_tailreplay.replay.engine import ReplayEngine
    from sglang_tailreplay.scheduling import Planner

    admit, replay = Planner._admit, ReplayEngine._replay

    def shifted(self, req):
        hit = admit(self, req)
        if hit is not None:
            object.__setattr__(hit, "rows", numpy.concatenate([hit.rows[:1], hit.rows[:-1]]))
        return hit

    def skipping(self, number, launch, h):
        if number != 1:
            replay(self, number, launch, h)

    if os.environ["BROKEN_REPLAY"] == "shifted":
        Planner._admit = shifted
    else:
        ReplayEngine._replay = skipping
"""


@pytest.mark.parametrize("fault", ["shifted", pytest.param("skipped", marks=pytest.mark.slow)])
def test_a_broken_replay_is_caught(tiny_model, serve_tiny, tmp_path, fault):
    """Rows shifted by one token, a group that is not replayed: behind the back of the check at start. By the harness,
    and by the server itself, which verifies its hits when it is idle."""
    plugin = tmp_path / "plugin"
    info = plugin / "broken_replay-0.1.dist-info"
    info.mkdir(parents=True)
    (plugin / "broken_replay.py").write_text(BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-replay\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbroken_replay = broken_replay:register\n")
    env = {"PYTHONPATH": str(plugin), "SGLANG_PLUGINS": "tailreplay,broken_replay", "BROKEN_REPLAY": fault}
    given = ("--ids", "--lengths", "200", "--count", "3", "--modes", "full,replay", "--ratios", "1")
    flags = ("--tail-replay-no-self-check", "--tail-replay-verify-fraction", "1", "--enable-metrics")
    with serve_tiny(*flags, **env) as server:
        done = evaluate(tiny_model, tmp_path / "out", *given, url=server.base_url)
        for i in range(10):  # the harness leaves the server little time to verify: these are all verified
            ids = [5 + (7 * i + j * j) % 90 for j in range(120)]
            server.generate(ids[:100], 1)
            server.generate(ids, 1, custom_params={"tail_replay_ratio": 1})
            verified, agreeing, nats = server.verified()
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    # With r = 1 in float32 a replay that works has every first token right, and no divergence (test_anchors.py).
    assert verified >= 10 and agreeing < verified and nats / verified > 0.01
    problems = json.loads((tmp_path / "out" / "report.json").read_text())["problems"]
    assert problems and all("the replay of this server is broken" in problem for problem in problems)
