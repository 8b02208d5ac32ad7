"""What scripts/workload makes of its passes: who is asked when, sums over passes, and where the first server wins."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "workloads"


@pytest.fixture(scope="module", autouse=True)
def found():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def run():
    return importlib.import_module("run")


@pytest.fixture
def outcome():
    return importlib.import_module("outcome")


URLS = ("--url", "stock=http://a", "--url", "ours=http://b/")


def samples(*ttft: float, cached: int = 50, replayed: int = 0):
    sample = importlib.import_module("client").Sample
    return [sample(100, cached, replayed, 10, ms, ms + 1) for ms in ttft]


def result(outcome, server: str, ttft: tuple[float, ...], seconds: float, workload: str = "rag") -> dict:
    return {"workload": workload, "server": server, **outcome.summarise([outcome.Pass(samples(*ttft), seconds)])}


def test_servers_go_first_in_turns(run):
    options = run.parse([*URLS, "rag", "chat", "--repeats", "2"])
    assert list(run.order(options, ["stock", "ours"])) == [
        (0, "rag", ["stock", "ours"]),
        (0, "chat", ["stock", "ours"]),
        (1, "rag", ["ours", "stock"]),
        (1, "chat", ["ours", "stock"]),
    ]


def test_a_scale_of_a_workload_beats_that_of_all(run):
    options = run.parse([*URLS, "--scale", "2", "--scale", "trace=0.5"])
    assert {name: run.load(name, options, "s", 1).scale for name in ("rag", "trace")} == {"rag": 2.0, "trace": 0.5}
    assert run.load("rag", run.parse(URLS), "s", 1).scale == 1.0
    with pytest.raises(SystemExit):
        run.parse([*URLS, "--scale", "tarce=0.5"])


@pytest.fixture
def passes_run(run, monkeypatch):
    """Stand-ins for the passes; the list of those that were run: workload, server, rounds."""
    done = []

    def run_pass(name, url, options, load):
        done.append((name, url, load.rounds))
        if url == "http://broken":
            raise run.ServerError("no")
        return run.Pass(samples(1.0), 1.0)

    monkeypatch.setattr(run, "run_pass", run_pass)
    return done


def test_a_pass_that_fails_keeps_those_before_it(run, passes_run):
    kept = []
    options = run.parse(["rag", "--url", "a=http://a", "--url", "b=http://broken", "--warm-up-rounds", "0"])
    with pytest.raises(run.ServerError):
        run.measure(options, kept.append)
    assert [list(passes) for passes in kept] == [[("rag", "a")]]


def test_warm_up_comes_once_and_time_ends_between_workloads(run, passes_run, monkeypatch):
    options = run.parse([*URLS, "rag", "chat", "--repeats", "2", "--rounds", "5", "--warm-up-rounds", "1"])
    run.measure(options, lambda passes: None)
    assert passes_run.count(("rag", "http://a", 1)) == 1 and passes_run.count(("rag", "http://a", 5)) == 2
    del passes_run[:]
    monkeypatch.setattr(run.time, "monotonic", iter(range(0, 1000, 100)).__next__)
    options.total_seconds = 350
    run.measure(options, lambda passes: None)  # looks at the clock before the workload and before each server
    assert {(name, url) for name, url, _ in passes_run} == {("rag", "http://a"), ("rag", "http://b")}


def test_passes_add_up(outcome):
    both = outcome.summarise([outcome.Pass(samples(1, 2), 2.0), outcome.Pass(samples(30, cached=0, replayed=7), 3.0)])
    assert (both["requests"], both["prompt_tokens"], both["hit_tokens"], both["replayed_tokens"]) == (3, 300, 100, 7)
    assert both["tokens_per_second"] == pytest.approx(330 / 5) and both["seconds"] == [2.0, 3.0]
    assert both["ttft_ms"] == {"p50": 2, "p90": 30, "p99": 30}
    assert both["samples"]["cached"] == [50, 50, 0]


def test_every_number_in_which_the_first_server_wins_is_told(outcome):
    stock, ours = result(outcome, "stock", (10, 20, 30), 1.0), result(outcome, "ours", (11, 12, 13), 2.0)
    cold = result(outcome, "cold", (10, 25, 30), 1.0)
    assert outcome.where_first_wins([stock, ours, cold]) == [
        "Where stock wins:",
        "- rag: stock does 330 tokens/s, ours 165",
        "- rag: stock has a TTFT p50 of 20.0 ms, cold 25.0 ms",
    ]


def test_nothing_is_said_without_a_second_server_and_no_win_is_said_so(outcome):
    stock, ours = result(outcome, "stock", (10, 20), 2.0), result(outcome, "ours", (9, 20), 1.0)
    assert outcome.where_first_wins([stock]) == []
    assert outcome.where_first_wins([stock, ours]) == ["stock wins in none of these numbers."]
    other = result(outcome, "ours", (1,), 9.0, workload="chat")  # the run was cut off: stock did not do this one
    assert outcome.where_first_wins([stock, other]) == ["stock wins in none of these numbers."]
