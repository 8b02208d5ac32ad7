"""What stands in the way of a start, collected: a start stops at the first problem, `doctor` names all of them.

Nothing here allocates device memory or reads weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_tailreplay import compat, guard
from sglang_tailreplay.errors import Refused, TailReplayError
from sglang_tailreplay.plugin import DISABLED, is_disabled

OK, NOTE, PROBLEM = "ok", "note", "problem"
OLDEST_CAPABILITY = (8, 0)  # bfloat16 matrix products in Triton kernels


class Finding(NamedTuple):
    level: str  # OK, NOTE, or PROBLEM: the start would fail
    text: str


class Device(NamedTuple):
    """What the server would run on."""

    kind: str  # cuda or cpu
    name: str
    free: int  # bytes, before a model is loaded
    capability: tuple[int, int] | None = None


def find_device() -> Device:
    import torch

    from sglang_tailreplay.row_store import free_host_bytes

    if not torch.cuda.is_available():
        return Device("cpu", "CPU", free_host_bytes())
    free, _ = torch.cuda.mem_get_info()
    return Device("cuda", torch.cuda.get_device_name(), free, torch.cuda.get_device_capability())


def versions() -> Iterator[Finding]:
    """SGLang, torch, and this plugin in SGLang's eyes."""
    import torch

    from sglang_tailreplay.launch_server import check_entry_point

    problem = compat.version_problem()
    if problem:
        yield Finding(PROBLEM, problem)
    else:
        yield Finding(OK, f"SGLang {compat.installed_version()}, torch {torch.__version__}")
    try:
        check_entry_point()
    except TailReplayError as error:
        yield Finding(PROBLEM, str(error))
    if is_disabled():
        yield Finding(PROBLEM, DISABLED)


def device(found: Device) -> Iterator[Finding]:
    if found.kind == "cpu":
        yield Finding(
            NOTE,
            "torch sees no CUDA GPU: the server would run on SGLang's CPU engine with this project's reference "
            "kernels, which is for tests and trials only",
        )
    elif found.capability < OLDEST_CAPABILITY:
        yield Finding(NOTE, f"{found.name} (compute capability {_dotted(found.capability)}): older than what was tried")
    else:
        yield Finding(OK, f"{found.name} (compute capability {_dotted(found.capability)})")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def hooks() -> Iterator[Finding]:
    """Every function of SGLang that is hooked must be there with the parameters that the hook relies on."""
    if compat.version_problem():
        return
    targets = compat.VERSIONS[compat.installed_version()].values()
    problems = [problem for target in targets if (problem := compat.signature_problem(target))]
    for problem in problems:
        yield Finding(PROBLEM, f"this SGLang {compat.installed_version()} cannot be hooked: {problem}")
    if not problems:
        yield Finding(OK, f"all {len(targets)} functions of SGLang that are hooked are as expected")


def model_folder(path: str) -> Iterator[Finding]:
    """A folder must look like a checkpoint. A name of a hub is left to SGLang."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield Finding(PROBLEM, f"--model-path {path}: the folder has no config.json")
    elif not folder.exists() and (folder.is_absolute() or path.startswith(".")):
        yield Finding(PROBLEM, f"--model-path {path}: there is no such folder")


def problems_of(error: TailReplayError) -> list[Finding]:
    return [Finding(PROBLEM, text) for text in (error.problems if isinstance(error, Refused) else [str(error)])]


class Settled(NamedTuple):
    server_args: Any | None  # as SGLang resolved them, refused flags left out; None where it could not
    findings: list[Finding]


def settle(arguments: Sequence[str]) -> Settled:
    """Parse and resolve as a start does, but go on after the first refusal without the refused flags."""
    try:
        parser, namespace, unknown = compat.parse_arguments(list(arguments))
    except TailReplayError as error:
        return Settled(None, [Finding(PROBLEM, str(error))])
    findings = [Finding(PROBLEM, f"SGLang knows no {' '.join(unknown)}")] if unknown else []
    while True:
        try:
            server_args = compat.resolve_arguments(copy.copy(namespace))
        except Refused as error:
            findings += problems_of(error)
            if _leave_out_refused(parser, namespace):
                continue
        except TailReplayError as error:
            findings.append(Finding(PROBLEM, str(error)))
        except Exception as error:  # whatever SGLang says to flags that have nothing to do with this project
            findings.append(Finding(PROBLEM, _refusal(error, namespace.model_path)))
        else:
            return Settled(server_args, findings or [Finding(OK, "the model's architecture and all flags fit")])
        return Settled(None, findings)


def _leave_out_refused(parser: Any, namespace: Any) -> bool:
    """Set refused flags to their defaults. Whether there were any, and none is left."""
    refused = guard.refused_flags(namespace)
    for refusal in refused:
        destination = parser._option_string_actions[refusal.flag].dest
        setattr(namespace, destination, parser.get_default(destination))
    return bool(refused) and not guard.refused_flags(namespace)


def _refusal(error: Exception, model_path: str) -> str:
    if isinstance(error, OSError) and not Path(model_path).exists():
        return f"--model-path {model_path}: no folder here, and not to be had from a model hub: {_first_line(error)}"
    return f"SGLang refuses these flags: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
