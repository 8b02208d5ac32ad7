"""Tests of the integration, without a server."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SANDBOX = Path(__file__).with_name("sandbox.py")


def _start() -> subprocess.Popen:
    """The process inherits nothing that would change what SGLang or the plugin does."""
    environ = {key: value for key, value in os.environ.items() if "SGLANG" not in key and "TAILREPLAY" not in key}
    return subprocess.Popen(
        [sys.executable, str(SANDBOX)],
        env=environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="session")
def sandbox():
    """sandbox(function, *arguments, **environ): what a function of a test file returns in a process of its own."""
    with _start() as process:

        def call(function, *arguments, **environ: str):
            request = dict(
                file=inspect.getfile(function), function=function.__name__, arguments=arguments, environ=environ
            )
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or '{"error": "the sandbox is gone"}')
            assert "error" not in answer, answer["error"]
            return answer["value"]

        yield call
        # Not by closing its input: a process that was forked meanwhile may hold that open, too.
        process.kill()


def write_model(path: str) -> None:
    from sglang_tailreplay.tiny_model import write_tiny_model

    write_tiny_model(path, num_hidden_layers=4)


@pytest.fixture(scope="session")
def tiny_model(sandbox, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    sandbox(write_model, path)
    return path


def stock_arguments() -> dict:
    """The defaults of every field of ServerArgs that has one."""
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    values = {}
    for field in dataclasses.fields(ServerArgs):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


@pytest.fixture(scope="session")
def _stock_arguments(sandbox) -> dict:
    return sandbox(stock_arguments)


@pytest.fixture
def server_args(_stock_arguments):
    """server_args(**settings): ServerArgs as SGLang parsed them, not resolved, with the backend chosen."""

    def make(**settings) -> SimpleNamespace:
        unknown = set(settings) - set(_stock_arguments) - {"model_path"}
        assert not unknown, f"ServerArgs has no {unknown}"
        chosen = {"model_path": "m", "radix_cache_backend": "tail_replay", "device": "cpu"}
        return SimpleNamespace(**{**_stock_arguments, **chosen, **settings})

    return make
