"""One server per setting for the whole run: a start takes many times longer than a test."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from sglang_tailreplay.tiny_model import write_tiny_model

# Test files are imported by path (--import-mode=importlib), so the helper beside them is loaded by path as well.
_spec = importlib.util.spec_from_file_location("serving_server", Path(__file__).with_name("server.py"))
_module = sys.modules.setdefault("serving_server", importlib.util.module_from_spec(_spec))
if not hasattr(_module, "serve"):
    _spec.loader.exec_module(_module)

VOCABULARY = 1000  # token ids that every tiny model has


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)


class Prompts:
    """Random prompts that no other test has used."""

    def __init__(self):
        self._random = random.Random(11)

    def __call__(self, n: int) -> list[int]:
        return [self._random.randrange(2, VOCABULARY) for _ in range(n)]


@pytest.fixture(scope="session")
def prompt() -> Prompts:
    return Prompts()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path, decay="slow")
    return path


@pytest.fixture(scope="session")
def serve_tiny(tiny_model, tmp_path_factory):
    """serve(*flags, **env): a float32 server of the tiny model, or of another one."""

    def serve(*flags: str, small=_module.SMALL, model=tiny_model, **env: str):
        log = tmp_path_factory.mktemp("server") / "log"
        return _module.serve(model, *small, *_module.FLOAT32, *flags, env={**_module.FLOAT32_ENV, **env}, log_path=log)

    return serve


@pytest.fixture(scope="session")
def cold(serve_tiny):
    """Stock SGLang without any prefix cache: what every answer is compared with."""
    with serve_tiny("--tail-replay-mode", "off", "--disable-radix-cache") as server:
        yield server


@pytest.fixture(scope="session")
def exact(serve_tiny):
    """r = 1: states are rebuilt from all rows, so answers must not differ from cold ones."""
    with serve_tiny("--tail-replay-ratio", "1.0", "--enable-metrics", "--enable-cache-report") as server:
        yield server


@pytest.fixture(scope="session")
def few_rows(serve_tiny):
    """r = 1 with a store of about 800 rows beside 4096 KV slots. Requests with a ratio of their own are bounded."""
    flags = ("--tail-replay-host-gb", "0.00044", "--tail-replay-max-residual", "0.8", "--enable-metrics")
    with serve_tiny("--tail-replay-ratio", "1.0", *flags) as server:
        yield server
