"""Every workload against one tiny server: requests succeed, prefixes hit, and what is reported adds up.

Also against that server: every metric that the dashboard draws is on /metrics."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "scripts" / "workloads" / "run.py"
SMALL = ("--scale", "0.03", "--rounds", "4", "--new-tokens", "8", "--concurrency", "4", "--warm-up-rounds", "0")
NAMES = ("programs", "agents", "chat", "rag", "trace")


@pytest.fixture(scope="module")
def document(exact, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("workloads") / "out.json"
    command = [sys.executable, RUN, "--url", f"ours={exact.base_url}", *SMALL, "--trace-requests", "8", "--out", out]
    done = subprocess.run(list(map(str, command)), cwd=out.parent, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(out.read_text()), "stdout": done.stdout, "page": out.with_suffix(".md").read_text()}


def rows(result: dict) -> list[dict]:
    """The samples, which the document has by field."""
    columns = result["samples"]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.fixture
def result(document, request) -> dict:
    (found,) = [result for result in document["results"] if result["workload"] == request.param]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("result", NAMES, indirect=True)
def test_a_workload_hits_and_adds_up(result, document):
    samples = rows(result)
    assert len(samples) == result["requests"] > 0
    for total, field in (("prompt_tokens", "prompt"), ("hit_tokens", "cached"), ("replayed_tokens", "replayed")):
        assert result[total] == sum(sample[field] for sample in samples)
    assert all(sample["cached"] < sample["prompt"] and sample["ttft_ms"] <= sample["latency_ms"] for sample in samples)
    assert 0 < result["replayed_tokens"] == result["hit_tokens"] < result["prompt_tokens"]  # this server has r = 1
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p90"] <= result["ttft_ms"]["p99"]
    assert f"{result['workload']} " in document["stdout"] and f"| {result['workload']} | ours |" in document["page"]


def by_number(document: dict, name: str) -> list[dict]:
    (found,) = [result for result in document["results"] if result["workload"] == name]
    return rows(found)


@pytest.mark.slow
def test_retrieval_shares_whole_documents(document):
    """5 waves over 4 documents of 180 tokens behind 9 of instructions; the first one is cold."""
    samples = by_number(document, "rag")
    assert len(samples) == 20
    assert sum(sample["cached"] for sample in samples[4:]) >= 16 * 189


@pytest.mark.slow
def test_chats_hit_where_thinking_was_stripped(document):
    """90 tokens of system prompt, 12 of question, 8 of answer of which 4 are thinking."""
    samples = by_number(document, "chat")
    assert len(samples) == 4 * 6  # 4 turns, one regenerated, one edited
    regenerated = [s for s in samples if s["cached"] == s["prompt"] - 1]
    assert len(regenerated) >= 4
    # the second turn shares all but the thinking with the first, and perhaps a token of it by chance
    second = [s["cached"] for s in samples if s["prompt"] == 90 + 12 + 4 + 12 and s["cached"] < s["prompt"] - 1]
    assert len(second) == 4 and all(90 + 12 <= cached <= 90 + 14 for cached in second)


@pytest.mark.slow
def test_forks_share_their_prompt(document):
    """120 tokens of examples before everything; question and hints of 4 tokens behind them."""
    samples = by_number(document, "programs")
    # per question: 1 few-shot; 4 votes and an answer; a tree of 2 levels with 3 thoughts each, and its answer
    assert len(samples) == 4 * (1 + (4 + 1) + (2 * 3 + 1))
    assert sum(sample["cached"] >= 120 for sample in samples) >= len(samples) - 4


@pytest.mark.slow
def test_memory_is_told(document):
    (server,) = document["servers"].values()
    assert server["backend"] == "tail_replay" and server["kv_slots"] == 4096 and server["running_requests"] == 8
    assert server["state_slots"] == 64 and server["state_gib"] > 0


def test_a_server_that_is_not_there_is_one_line(tmp_path):
    command = [sys.executable, str(RUN), "rag", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_the_dashboard_draws_what_a_server_tells(exact, prompt):
    ids = prompt(100)
    exact.generate(ids, 2)
    exact.generate(ids[:80] + prompt(9), 2)
    there = {sample.name for sample in exact.metric_samples()}
    drawn = set(re.findall(r"sglang:\w+", (ROOT / "docs" / "grafana" / "tail-replay.json").read_text()))
    assert drawn - there == set()
