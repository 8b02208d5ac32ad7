"""The end of scripts/soak --kill against stand-ins for servers: two processes, of which one is called a scheduler."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from soak import restart
from soak.client import Client
from soak.plan import Limits
from soak.run import Settings

LIMITS = Limits(max_prompt=80, max_new=200, concurrency=6, running=4, context=400, vocabulary=(2, 1000))
# Ends with its scheduler, as SGLang's does, unless it is to live on. Answers slowly, so that some are under way then.
# The scheduler's name must not be found in this program's own command line.
SERVER = """
import os, subprocess, sys, time
sys.path.insert(0, {folder!r})
import fake_server
token = fake_server.next_token
def slow_token(ids):
    time.sleep(0.01)
    return token(ids + [{salt}])
fake_server.next_token = slow_token
fake = fake_server.Fake()
scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "sglang:" ":scheduler"])
print(fake.server_address[1], flush=True)
scheduler.wait()
time.sleep({lives})
os._exit(1)
"""


def start(salt: int = 0, lives: float = 0) -> SimpleNamespace:
    program = SERVER.format(folder=str(Path(__file__).parent), salt=salt, lives=lives)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    return SimpleNamespace(process=process, base_url=f"http://127.0.0.1:{process.stdout.readline().strip()}")


def stop(server: SimpleNamespace) -> None:
    try:
        os.killpg(server.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    server.process.wait()
    server.process.stdout.close()


def failures(first: dict, following: dict, limits: Limits = LIMITS) -> set[str]:
    """What is found when the first server is killed and the following one started."""
    servers = [start(**first)]

    def again() -> SimpleNamespace:
        servers.append(start(**following))
        return servers[1]

    async def run():
        client = Client(servers[0].base_url, 20.0, 16)
        try:
            return await restart.kill_and_restart(
                client, servers[0], again, stop, Settings(1, 60, limits, 0.7, None, 0)
            )
        finally:
            await client.close()

    try:
        return {failure.what for failure in asyncio.run(run())}
    finally:
        stop(servers[-1])


def test_clients_hear_of_the_kill_and_the_next_start_is_clean():
    assert failures({}, {}) == set()


def test_another_answer_after_the_restart_is_found():
    assert failures({}, {"salt": 1}) == {"restart"}


def test_a_server_that_outlives_its_scheduler_is_found(monkeypatch):
    monkeypatch.setattr(restart, "GONE_SECONDS", 0.3)
    assert failures({"lives": 30}, {}) == {"kill", "processes-left"}


def test_a_load_that_was_over_before_the_kill_is_found():
    assert failures({}, {}, LIMITS._replace(max_new=2)) == {"kill"}


def test_a_client_that_waits_for_a_dead_scheduler_is_found():
    heard = [SimpleNamespace(status=None, message="no end after 20 s"), SimpleNamespace(status=500, message="")]
    assert [failure.what for failure in restart._judge_load(heard, 20.0)] == ["kill-hangs"]
