"""Runs functions of test files in forks of one process that has imported SGLang and hooked nothing.

    python sandbox.py     reads one JSON call a line, answers with one JSON result a line

A hook patches SGLang for the whole process, so every test of one needs a process of its own; a fork costs
milliseconds, an import of SGLang ten seconds.
"""

import gc
import importlib.util
import json
import os
import signal
import sys
import traceback

SECONDS = 60  # of one call


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    import_sglang()
    gc.freeze()  # a fork that collects garbage would copy most of this process
    for line in sys.stdin:
        answers.write(call(json.loads(line)) + "\n")
        answers.flush()
    os._exit(0)  # SGLang's own clean-up takes seconds


def import_sglang() -> None:
    from sglang_tailreplay import cpu

    cpu.activate()
    for module in ("pytest", "sglang_tailreplay.plugin", "sglang_tailreplay.hooks", "sglang_tailreplay.cpu.hooks"):
        importlib.import_module(module)
    from sglang_tailreplay import compat

    for target in compat.VERSIONS[compat.installed_version()].values():
        compat.signature_problem(target)  # imports its module, which a fork then need not do


def call(request: dict) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with os.fdopen(write, "w") as answer:
            signal.alarm(SECONDS)
            json.dump(result(**request), answer, default=str)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    return text if status == 0 else json.dumps({"error": f"ended with status {status}"})


def result(file: str, function: str, arguments: list, environ: dict) -> dict:
    os.environ.update(environ)
    try:
        spec = importlib.util.spec_from_file_location("called", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return {"value": getattr(module, function)(*arguments)}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
