"""bench_ttft's sections against an engine that only keeps account of its cache: what lies where."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import bench_plan
import bench_runner
import engine_runner
import psutil
import pytest
from bench_plan import BenchPlan, Sizes

SIZES = Sizes(lengths=(300, 600), hits=2, cold=1, primes=1, bursts=(1, 2), burst_length=100, burst_rounds=1)


class AccountingEngine:
    """Serves any cached prefix, with a tail of a share of it, from the tier of the longest prompt that has it."""

    def __init__(self, host_tier=True, busy=0):
        self.loop = asyncio.new_event_loop()
        self.prompts = {}  # prompt -> "device" or "host"
        self.host_tier, self.busy = host_tier, busy
        self.evictions = 0
        self.profiled = None

    def generate(self, input_ids, sampling_params):
        cached, tier = max((shared(input_ids, other), tier) for other, tier in [((), "device"), *self.prompts.items()])
        self.prompts |= {other: "device" for other in self.prompts if shared(input_ids, other) >= cached > 0}
        self.prompts[tuple(input_ids)] = "device"
        ratio = sampling_params.get("custom_params", {}).get("tail_replay_ratio", 0)
        details = {tier: cached, "tail_replay_replayed": max(int(ratio * cached) + 1, 64)} if cached else None
        meta = {"cached_tokens": cached, "cached_tokens_details": details}
        return {"meta_info": {**meta, "completion_tokens": sampling_params["max_new_tokens"]}}

    async def async_generate(self, input_ids, sampling_params, stream):
        reply = self.generate(input_ids, sampling_params)

        async def parts():
            yield reply
            yield reply

        return parts()

    def collective_rpc(self, method):
        assert method == "evict_device_cache"
        if self.busy:
            self.busy -= 1
            raise AssertionError("3 cached tokens stay on the GPU")
        self.evictions += 1
        if self.host_tier:
            self.prompts = dict.fromkeys(self.prompts, "host")

    def start_profile(self, output_dir, **options):
        self.profiled = output_dir, len(self.prompts)

    def stop_profile(self):
        folder, before = self.profiled
        assert len(self.prompts) == before + 1, "one hit, and nothing else"
        event = {"cat": "kernel", "name": "k", "ph": "X", "pid": 0, "ts": 0, "dur": 1, "args": {"stream": 7}}
        with gzip.open(f"{folder}/1-TP-0.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [event]}, file)


def shared(a, b):
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return min(same, len(a) - 1)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(bench_runner, "SETTLE_SECONDS", 0)


def runner(engine, name="host", trace=None):
    plan = BenchPlan(name, {"chunked_prefill_size": 256}, {}, (), 200_000, SIZES, trace)
    return bench_runner.BenchRunner(plan, engine, lambda text: None, 0.0)


def test_hits_come_from_the_tier_that_they_are_measured_for():
    engine = AccountingEngine(busy=2)
    samples = list(runner(engine).hits())
    assert [sample["rejected"] for sample in samples] == [None] * len(samples)
    hits = [sample for sample in samples if sample["kind"] == "hit"]
    assert all(sample[sample["source"]] == sample["length"] for sample in hits)
    assert {sample["source"] for sample in hits} == {"host", "device"}
    planned = bench_plan.requests(SIZES, "host", 256)
    assert engine.evictions == sum(request.source == "host" for request in planned)


def test_an_engine_without_hits_is_given_up():
    engine = AccountingEngine()
    engine.generate = lambda input_ids, sampling_params: {"meta_info": {"cached_tokens": 0}}
    collected = []
    with pytest.raises(RuntimeError, match="8 samples in a row were rejected"):
        for sample in runner(engine, "resident").hits():
            collected.append(sample)
    assert all(sample["rejected"] for sample in collected if sample["kind"] != "cold")


def test_kv_that_stays_on_the_gpu_stops_the_section(monkeypatch):
    monkeypatch.setattr(bench_runner, "EVICT_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="3 cached tokens stay on the GPU"):
        runner(AccountingEngine(busy=10**6)).evict()


def test_bursts_are_all_hits():
    engine = AccountingEngine()
    samples = list(runner(engine).bursts())
    assert [(sample["variant"], len(sample["ttft_ms"])) for sample in samples] == [
        ("different", 1),
        ("different", 2),
        ("same", 2),
    ]
    assert all(sample["rejected"] is None and set(sample["cached"]) == {100} for sample in samples)
    assert all(0 < ms <= sample["seconds"] * 1e3 for sample in samples for ms in sample["ttft_ms"])
    assert samples[1]["new_tokens"] == 2 * SIZES.burst_new_tokens


def test_stock_is_asked_without_a_tier_or_a_ratio():
    samples = list(runner(AccountingEngine(), "stock").hits())
    assert {sample["kind"] for sample in samples} == {"cold", "diverge", "again", "aligned"}
    assert all(sample["rejected"] is None and sample["source"] is None for sample in samples)


def test_traces_are_of_the_shortest_and_the_longest_hit_and_lie_where_they_were_asked_for(tmp_path):
    rows = list(runner(AccountingEngine(), trace=str(tmp_path / "hit.trace.json.gz")).trace())
    files = [tmp_path / row["file"] for row in rows]
    assert [file.name for file in files] == [f"hit.{row['length']}.trace.json.gz" for row in rows]
    assert [row["bytes"] for row in rows] == [file.stat().st_size for file in files]
    assert [row["length"] for row in rows] == sorted({min(SIZES.lengths), max(SIZES.lengths)})
    assert {row["ratio"] for row in rows} == {0.1}


def test_a_failed_section_keeps_its_samples():
    outcomes = []
    failing = SimpleNamespace(
        SUMMARIES={"hits": len}, say=lambda text: None, hits=lambda: (1 / (2 - number) for number in range(3))
    )
    engine_runner.run_section(failing, "hits", outcomes.append)
    assert (outcomes[-1]["ok"], outcomes[-1]["result"], len(outcomes[-1]["samples"])) == (False, 2, 2)
    assert "ZeroDivisionError" in outcomes[-1]["error"]


def test_engines_that_share_a_turn_measure_one_after_the_other(tmp_path):
    path, said, order = str(tmp_path / "turn"), [], []

    def measure(name, seconds):
        with engine_runner.turn(path, said.append):
            order.append(f"{name} begins")
            time.sleep(seconds)
            order.append(f"{name} ends")

    threads = [threading.Thread(target=measure, args=(name, 0.1)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(said) == 3 and len(order) == 6
    for begin, end in zip(order[::2], order[1::2], strict=True):
        assert (begin.split()[0], begin.split()[1], end.split()[1]) == (end.split()[0], "begins", "ends")


def test_an_engine_alone_takes_no_turn():
    with engine_runner.turn(None, lambda text: pytest.fail(text)):
        pass


def test_processes_of_a_waiting_engine_sleep():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with engine_runner.asleep():
            wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_RUNNING)
    finally:
        child.kill()
        child.wait()


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
