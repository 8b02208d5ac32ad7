"""scripts/soak against a server with one planted fault: it is found, named, and nothing else is."""

import asyncio
import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "lib"))

from soak import processes  # noqa: E402
from soak.client import Client, read_answer  # noqa: E402
from soak.plan import Limits  # noqa: E402
from soak.run import Settings, Soak, calibrate  # noqa: E402

# Test files are imported by path (--import-mode=importlib), so the helper beside them is loaded by path as well.
_spec = importlib.util.spec_from_file_location("soak_fake_server", Path(__file__).with_name("fake_server.py"))
fake_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_server)

LIMITS = Limits(max_prompt=80, max_new=8, concurrency=6, running=4, context=260, vocabulary=(2, 1000))


def soaked(fault="", rounds=16, deadline=20.0):
    fake = fake_server.Fake(fault)

    async def run():
        client = Client(fake.url, deadline, 64)
        settings = Settings(1, 60, LIMITS, 0.7, None, 2**30, max_failures=3, max_rounds=rounds, rest_seconds=0.5)
        soak = Soak(client, settings)
        try:
            await soak.run()
        finally:
            await client.close()
        return soak

    try:
        return asyncio.run(run())
    finally:
        fake.shutdown()
        fake.server_close()


def test_a_faultless_server_passes():
    soak = soaked()
    assert soak.failures == []
    report = soak.tally.report()
    assert report["compared_with_cold"] > 20 and report["of_them_hits"] > 10
    assert soak.metrics_watched and soak.flushes["idle"] >= 2
    json.dumps(report)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("wrong-token", {"wrong-token"}),
        ("nan", {"nan"}),
        ("5xx", {"5xx", "cold-failed", "dead"}),  # the last request of all may be the one
        ("short", {"short-answer", "wrong-token"}),
        ("cached-too-much", {"cached-too-much"}),
        ("not-isolated", {"not-isolated"}),
        ("stale", {"cached-too-much", "row-leak"}),
        ("row-leak", {"row-leak"}),
        ("5xx-for-bad", {"not-refused"}),
        ("accepts-bad", {"not-refused"}),
        ("silent", {"not-refused"}),
        ("no-hits", {"nothing-proved"}),
    ],
)
def test_a_planted_fault_is_found_and_no_other(fault, what):
    soak = soaked(fault)
    found = {failure.what for failure in soak.failures}
    assert found and found <= what, soak.failures


def test_a_server_that_hangs_is_found_in_time():
    soak = soaked("hang", rounds=3, deadline=1.0)
    assert {failure.what for failure in soak.failures} & {"no-answer", "cold-failed"}


def test_a_server_that_is_gone_is_found():
    async def run():
        client = Client("http://127.0.0.1:9", 2.0, 8)
        soak = Soak(client, Settings(1, 0.5, LIMITS, 0.5, None, 2**30, 3, rest_seconds=0.2))
        await soak.run()
        await client.close()
        return {failure.what for failure in soak.failures}

    assert {"flush", "no-answer", "unhealthy", "dead"} <= asyncio.run(run())


def test_a_bound_that_would_hide_everything_is_refused():
    """This server's log-probabilities are constant: a wrong prompt differs by much, an honest answer by nothing."""
    fake = fake_server.Fake()

    async def run(seed):
        client = Client(fake.url, 10.0, 8)
        try:
            return await calibrate(client, seed, LIMITS)
        finally:
            await client.close()

    try:
        found = asyncio.run(run(3))
        assert found.noise == 0 and 0 < found.bound < found.control
        fake_server.next_token, kept = (lambda ids: 7), fake_server.next_token
        try:
            with pytest.raises(RuntimeError, match="would not be seen"):
                asyncio.run(run(4))
        finally:
            fake_server.next_token = kept
    finally:
        fake.shutdown()
        fake.server_close()


SLEEPER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_processes_are_counted_with_their_children_and_seen_to_go():
    parent = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        family = processes.tree(parent.pid)
        assert {process.pid for process in family} == {parent.pid, child}
        sample = processes.sample(parent.pid)
        assert sample.processes == 2 and sample.rss_bytes > 2**20
        assert {process.pid for process in processes.wait_gone(family, 0.2)} == {parent.pid, child}
        for process in family:
            process.kill()
        begin = time.monotonic()
        assert processes.wait_gone(family, 10) == []  # the parent is a zombie still: nobody has waited for it
        assert time.monotonic() - begin < 8
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert processes.sample(parent.pid).processes == 0


def test_what_a_killed_server_leaves_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    rows, counters = tmp_path / "rows", tmp_path / "counters"
    (tmp_path / "of-somebody-else").write_bytes(bytes(2**21))
    counters.write_bytes(bytes(16_396))
    rows.write_bytes(bytes(2**21))
    with rows.open("r+b") as file, mmap.mmap(file.fileno(), 0), socket.socket() as held:
        mapped = processes.shared_memory(processes.tree(os.getpid()))
        assert mapped == {rows}
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        found = list(processes.left_behind(port, {rows, counters}))
    assert [failure.what for failure in found] == ["port-held", "shared-memory-left"]
    assert "'rows': 2097152" in found[1].text
    rows.unlink()
    assert list(processes.left_behind(port, {rows, counters})) == []


def test_only_an_aborted_answer_may_lack_its_numbers():
    """SGLang leaves them out where a request was aborted in the queue."""
    aborted = {"meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}
    assert read_answer(aborted) | {"top": None} == {
        **{"tokens": (), "cached": 0, "generation": None, "retractions": 0, "finish": "abort", "message": "gone"},
        **{"chosen": None, "top": None},
    }
    with pytest.raises(KeyError):
        read_answer({"output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}})
