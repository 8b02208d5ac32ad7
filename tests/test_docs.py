"""Every command in the documentation runs, or is read by the program that it calls; every file it links to exists.

A command is a line indented by four spaces in README.md or docs/. Programs under scripts/ are called without their
first step, scripts/setup, which builds an environment."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_tailreplay.config import SWITCHES, TailReplayConfig, dashed

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "models").rglob("*.md"))]
# Beginnings of commands that other tests run, or that only a machine with a model or a GPU can.
ELSEWHERE = {
    "scripts/setup": "every test runs in what it made",
    "scripts/cost_model": "tests/scripts/test_cost_tables.py",
    "scripts/demo": "its servers are those of tests/serving",
    ".venv/bin/python -m sglang_tailreplay.launch_server": "tests/serving/test_readme.py",
    "python -m sglang_tailreplay.tiny_model": "tests/test_tiny_model.py",
    "SGLANG_TAILREPLAY=": "tests/serving/test_operation.py",
    "sglang.Engine(": "tests/serving/test_operation.py",
    "curl localhost:30000/v1/chat/completions": "tests/serving/test_readme.py",
    "curl -s localhost:30000/metrics": "tests/serving/test_readme.py",
    "scripts/soak": "tests/serving/test_soak.py",
    "sglang-tailreplay doctor": "tests/integration/test_doctor.py",
    "sglang-tailreplay calibrate": "tests/serving/test_calibrate.py",
    "sglang-tailreplay serve": "tests/calibrate/test_file.py",
    ".venv/bin/sglang-tailreplay calibrate": "tests/serving/test_calibrate.py",
    ".venv/bin/sglang-tailreplay doctor": "tests/integration/test_doctor.py",
}


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def commands() -> list[str]:
    found = []
    for page in PAGES:
        fenced = False
        for line in page.read_text().splitlines():
            fenced ^= line.startswith("```")
            if not line.startswith("    ") or fenced or not line.strip():
                continue
            if found and found[-1].endswith("\\"):
                found[-1] = found[-1][:-1] + line.strip()
            elif found and not is_whole(found[-1]):
                found[-1] += line.strip()
            else:
                found.append(line.strip())
    return found


def is_whole(command: str) -> bool:
    """Whether all quotation marks are closed."""
    try:
        words(command)
    except ValueError:
        return False
    return True


def elsewhere(command: str) -> bool:
    return command.startswith("# ") or any(command.startswith(beginning) for beginning in ELSEWHERE)


HERE = [command for command in commands() if not elsewhere(command)]


def test_the_list_of_exceptions_is_short_of_nothing_and_holds_nothing_else():
    everything = commands()
    assert [beginning for beginning in ELSEWHERE if not any(c.startswith(beginning) for c in everything)] == []
    assert any("simulate" in command for command in HERE)
    named = [ROOT / reason for reason in ELSEWHERE.values() if reason.startswith("tests/")]
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("scripts/simulate")])
def test_simulate(command, tmp_path):
    arguments = [str(ROOT / word) if word.startswith("scripts/") else word for word in words(command)[1:]]
    memory = arguments[:1] == ["memory"]
    arguments, said = arguments[memory:], "tails only" if memory else "any token, no limits"
    program = ROOT / "scripts" / "lib" / ("simulate_memory.py" if memory else "simulate.py")
    done = subprocess.run(
        [sys.executable, program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and said in done.stdout, done.stderr


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("scripts/workload")])
def test_workload_options(command, monkeypatch):
    """The workloads themselves run in tests/serving/test_workloads.py."""
    for folder in ("lib", "workloads"):
        monkeypatch.syspath_prepend(str(ROOT / "scripts" / folder))
    options = importlib.import_module("run").parse(words(command)[1:])
    assert options.url and options.workloads


QUALITY = ("scripts/eval_quality", "scripts/eval_turns", "scripts/state_errors")


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith(QUALITY)])
def test_quality_options(command, monkeypatch, tmp_path):
    """The evaluations themselves run in tests/serving/test_quality.py and tests/scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    program, *given = words(command)
    arguments = [str(tmp_path) if word in ("M", "DIR", "RUN") else word for word in given]
    assert importlib.import_module(Path(program).name).parse(arguments).model_path


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("scripts/train_hybrid")])
def test_training_options(command, monkeypatch):
    """Training itself runs in tests/scripts/test_train.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    assert importlib.import_module("train_hybrid").parse(words(command)[1:]).seconds


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("scripts/plot")])
def test_what_is_plotted_can_be(command, monkeypatch):
    """Drawing itself: tests/scripts/test_plot.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "lib"))
    plot = importlib.import_module("plot")
    for path in plot.parse(words(command)[1:]).files:
        assert plot.figure_of(path, json.loads((ROOT / path).read_text())).path.parent == path.parent


def test_every_command_has_a_test():
    programs = ("scripts/plot", "scripts/simulate", "scripts/workload", *QUALITY, "scripts/train_hybrid")
    assert [command for command in HERE if not command.startswith(programs)] == []


def test_the_table_of_flags_names_every_setting():
    rows = re.findall(r"^\| `(--tail-replay-[\w-]+)`, `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    keys = TailReplayConfig.__slots__
    assert sorted(rows) == sorted((f"--tail-replay-{'no-' * (key in SWITCHES)}{dashed(key)}", key) for key in keys)


def test_pages_name_no_flag_that_does_not_exist():
    known = {f"--tail-replay-{'no-' * (key in SWITCHES)}{dashed(key)}" for key in TailReplayConfig.__slots__}
    named = {flag for page in PAGES for flag in re.findall(r"--tail-replay-[a-z]+(?:-[a-z]+)*", page.read_text())}
    assert named - known == {"--tail-replay-calibration"}


def test_programs_and_files_that_pages_name_exist():
    missing = []
    for page in PAGES:
        text = page.read_text()
        links = [page.parent / link for link in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
        named = [ROOT / name for name in re.findall(r"`((?:scripts|tests|docs|sglang_tailreplay)/[\w./-]+)`", text)]
        missing += [f"{page.name}: {path}" for path in [*links, *named] if not path.exists()]
    assert missing == []


def slug(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_headings_that_pages_link_to_exist():
    missing = []
    for page in PAGES:
        for link, heading in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            target = page.parent / link if link else page
            if heading not in map(slug, re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)):
                missing.append(f"{page.name}: {link}#{heading}")
    assert missing == []
