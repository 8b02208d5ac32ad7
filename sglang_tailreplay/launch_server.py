"""python -m sglang_tailreplay.launch_server --model-path M [--tail-replay-*] [any flag of sglang.launch_server]

Puts the --tail-replay-* flags into SGLANG_TAILREPLAY, chooses the backend, on a machine without CUDA SGLang's CPU
engine with this package's kernels, and starts sglang.launch_server.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import MutableMapping
from typing import Any

from sglang_tailreplay import calibration, config, cpu
from sglang_tailreplay.errors import Parser, Refused, TailReplayError
from sglang_tailreplay.plugin import DISABLED, is_disabled
from sglang_tailreplay.row_store import free_host_bytes


def translate(argv: list[str], environ: MutableMapping[str, str]) -> list[str]:
    """SGLang's arguments for our arguments; sets SGLANG_TAILREPLAY in environ. TailReplayError for a bad setting."""
    parser = Parser(
        prog="python -m sglang_tailreplay.launch_server", add_help=False, allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    config.add_flags(parser)
    parser.add_argument(
        calibration.FLAG, dest="calibration", metavar="FILE",
        help=f"take {', '.join(map(config.dashed, calibration.RECOMMENDED))} from a file of "
        "'sglang-tailreplay calibrate'; flags and SGLANG_TAILREPLAY beat it",
    )  # fmt: skip
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        print("\nand the flags of sglang.launch_server:\n")
        return argv
    flags, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("--tail-replay-")]
    if unknown:
        raise TailReplayError(f"unknown flag {unknown[0]}; --help lists the --tail-replay flags")
    calibrated = _calibrated(flags.calibration, rest) if flags.calibration is not None else None
    del flags.calibration
    chosen = config.TailReplayConfig.from_environment(environ, calibrated, **vars(flags))
    environ[config.ENVIRONMENT] = chosen.to_json()
    if any(word.split("=")[0] == "--radix-cache-backend" for word in rest):
        raise TailReplayError("--radix-cache-backend is this launcher's choice; --tail-replay-mode off takes SGLang's")
    return rest if chosen.mode == "off" else [*rest, "--radix-cache-backend", config.BACKEND]


def without_settings(argv: list[str]) -> list[str]:
    """Without the flags that `translate` may refuse, and their values."""
    kept, ours = [], False
    for word in argv:
        if re.match("--?[a-zA-Z]", word):  # a flag, not a value like -1
            ours = word.startswith(("--tail-replay-", "--radix-cache-backend"))
        if not ours:
            kept.append(word)
    return kept


def _calibrated(path: str, arguments: list[str]) -> dict[str, Any]:
    """What a calibration file recommends for the model of these arguments; says so where the operator sees it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    model = parser.parse_known_args(arguments)[0].model_path
    if model is None:
        raise TailReplayError(f"{calibration.FLAG} needs --model-path on the command line, to see that both fit")
    document = calibration.read(path)
    chosen = calibration.recommended(document, path, model)
    told = ", ".join(f"{key}={value}" for key, value in chosen.items())
    print(f"tail_replay: {told} from {path} (prompts: {document['prompts']})", file=sys.stderr)
    return chosen


def check_entry_point() -> None:
    """SGLang finds plugins by the metadata of installed packages, not by imports."""
    from importlib.metadata import entry_points

    if not any(e.value == "sglang_tailreplay.plugin:register" for e in entry_points(group="sglang.srt.plugins")):
        raise TailReplayError("sglang-tailreplay is not installed in this environment: run 'pip install -e .' first")
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "tailreplay" not in [name.strip() for name in allowed.split(",")]:
        raise TailReplayError(f"SGLANG_PLUGINS={allowed} leaves the plugin out: add 'tailreplay'")


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def prepare(argv: list[str]) -> list[str]:
    """SGLang's arguments on this machine; its environment is set for the server. TailReplayError for a bad setting."""
    arguments = translate(argv, os.environ)
    if not has_cuda():
        cpu.activate()
        arguments += cpu.default_arguments(arguments, free_host_bytes())
    return arguments


def main(argv: list[str]) -> None:
    try:
        check_entry_point()
        arguments = prepare(argv)
        if config.BACKEND in arguments and is_disabled():  # SGLang would say so after it has loaded the model
            raise TailReplayError(f"{DISABLED}, or give --tail-replay-mode off")
        _launch(arguments)
    except TailReplayError as error:
        more = len(error.problems) - 1 if isinstance(error, Refused) else 0
        if more:
            print(f"{more} more of this kind: 'sglang-tailreplay doctor' with these flags names all", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _launch(arguments: list[str]) -> None:
    """What `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(arguments)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
