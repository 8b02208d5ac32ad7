"""Every command in the documentation that starts a server is one that its program and SGLang's own parser take.

What the commands do is tested elsewhere: tests/test_docs.py says where."""

import importlib.util
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("documented", ROOT / "tests" / "test_docs.py")
documented = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(documented)
COMMANDS = [shlex.split(command, comments=True) for command in documented.commands()]


def after(words: list[str], name: str) -> list[str] | None:
    """The arguments of the program `name`, which may be two words; None where this is no command of it."""
    for count in (1, 2):
        for at in range(3):
            if " ".join(words[at : at + count]).endswith(name):
                return words[at + count :]
    return None


def all_of(name: str) -> list[list[str]]:
    found = [arguments for words in COMMANDS if (arguments := after(words, name)) is not None]
    assert found, f"no command of {name} is documented"
    return found


def unknown_flags(flags: list[str]) -> list[str]:
    """Words that neither this project nor SGLang knows; an error for values that do not parse."""
    from sglang_tailreplay import compat, launch_server

    return compat.parse_arguments(launch_server.translate(flags, {}))[2]


def stock_unknown_flags(flags: list[str]) -> list[str]:
    from sglang_tailreplay import compat

    return compat.parse_arguments(flags)[2]


def test_servers(sandbox):
    for flags in all_of("sglang_tailreplay.launch_server"):
        assert sandbox(unknown_flags, flags) == []
    for flags in all_of("sglang.launch_server"):
        assert sandbox(stock_unknown_flags, flags) == []


def test_settings_in_the_environment():
    from sglang_tailreplay.config import TailReplayConfig

    prefix = "SGLANG_TAILREPLAY="
    settings = [word.removeprefix(prefix) for words in COMMANDS for word in words if word.startswith(prefix)]
    assert settings and all(TailReplayConfig.from_environment({"SGLANG_TAILREPLAY": text}) for text in settings)


def test_servers_of_other_programs(sandbox, monkeypatch):
    from sglang_tailreplay import calibrate

    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "lib"), *sys.path])
    evaluate, soak = importlib.import_module("eval_quality"), importlib.import_module("soak.cli")
    model = ["--model-path", "M"]
    found = [calibrate.parse(arguments)[2] for arguments in all_of("sglang-tailreplay calibrate")]
    for arguments in all_of("scripts/soak"):
        found.append(soak.server_flags(*soak.options_of(["1" if word == "PID" else word for word in arguments])))
    found += [evaluate.parse(arguments).server_flags for arguments in all_of("scripts/eval_quality")]
    assert len(found) > 6
    for flags in found:
        assert sandbox(unknown_flags, [*model, *flags]) == []
