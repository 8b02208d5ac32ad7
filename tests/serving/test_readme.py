"""The README's commands, as they stand there: its server, its request, and what it says about the answers.

On that server also: whether the model that comes with this repository still answers rightly after a short replay."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from serving_server import serve

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EVALUATE = ROOT / "scripts" / "lib" / "eval_quality.py"


def command(beginning: str, lines: int = 1) -> list[str]:
    """The words of a command of the README."""
    at = README.index(f"    {beginning}")
    return shlex.split(" ".join(README[at:].splitlines()[:lines]), comments=True)


@pytest.fixture(scope="module")
def readme_server(tmp_path_factory):
    words = command(".venv/bin/python -m sglang_tailreplay.launch_server")
    model, *flags = words[words.index("--model-path") + 1 :]
    log = tmp_path_factory.mktemp("readme") / "log"
    with serve(ROOT / model, *flags, "--sleep-on-idle", log_path=log) as server:
        yield server


def ask(server, name: str) -> tuple[str, int]:
    """The README's request about that person: the answer, and cached tokens."""
    words = command("curl localhost:30000/v1/chat/completions", lines=2)
    body = words[words.index("-d") + 1].replace("consider ada", f"consider {name}")
    reply = server.post(words[1].removeprefix("localhost:30000"), json.loads(body))
    details = reply["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return reply["choices"][0]["message"]["content"].strip(), details["cached_tokens"]


def test_two_commands_lead_to_a_visible_hit(readme_server):
    first, second = re.search(r"It answers `([\w ]+)`\. Ask once more with `consider bob`: `([\w ]+)`", README).groups()
    cached = int(re.search(r'`"cached_tokens": (\d+)`', README).group(1))
    assert ask(readme_server, "ada") == (first, 0)
    assert ask(readme_server, "bob") == (second, cached)
    counted = command("curl -s localhost:30000/metrics")[-1].removeprefix("^")
    lines = readme_server.open("/metrics").decode().splitlines()
    assert any(line.startswith(counted) and 'kind="replayed"' in line and line.endswith(" 1.0") for line in lines)
    assert "tail_replay: ready, " in readme_server.log()


def test_the_small_trained_model_answers_after_a_replay_and_not_from_zero_states(readme_server, serve_tiny, tmp_path):
    """What the tiny random models cannot show: answers that are right or wrong."""
    model = ROOT / "models" / "tiny-local"
    with serve_tiny("--tail-replay-mode", "zero", model=model) as zero:
        words = [sys.executable, EVALUATE, "--model-path", model, "--out", tmp_path, "--benchmarks", "facts"]
        words += ["--tasks", "niah,vt", "--lengths", 500, "--count", 4, "--cuts", "question", "--ratios", 0.05]
        words += ["--url", readme_server.base_url, "--zero-url", zero.base_url]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    scores = {variant: [] for variant in ("full", "r=0.05", "zero")}
    for answer in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines()[1:]):
        scores[answer["variant"]].append(answer["score"])
    mean = {variant: sum(found) / len(found) for variant, found in scores.items()}
    assert mean["full"] >= 0.9 and mean["r=0.05"] >= 0.9 and mean["zero"] <= 0.5, mean
