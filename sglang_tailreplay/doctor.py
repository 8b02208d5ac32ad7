"""sglang-tailreplay doctor --model-path M [any flag of `serve`]

Says, without loading a model, whether a server with these flags would start, what memory goes where, and what a hit
costs at least. Exit code 0: it would start; 1: it would not, and every problem found is named, with the command
that would start if leaving out flags is enough; 2: a wrong call of doctor itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_tailreplay import compat, diagnosis, forecast, launch_server, remedy
from sglang_tailreplay.config import BACKEND, ENVIRONMENT
from sglang_tailreplay.diagnosis import NOTE, PROBLEM, Device, Finding
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.memory_plan import GIB
from sglang_tailreplay.row_store import free_host_bytes

COMMAND = "sglang-tailreplay"
Section = list[tuple[str, str]]  # what, how much


@dataclass
class Report:
    model: str
    findings: list[Finding] = field(default_factory=list)
    sections: dict[str, Section] = field(default_factory=dict)
    examined: bool = True  # False for stock SGLang
    remedy: str | None = None  # a command that was found to start, where this one does not

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    @property
    def problems(self) -> int:
        return sum(finding.level == PROBLEM for finding in self.findings)

    @property
    def starts(self) -> bool | None:
        """None: nobody knows."""
        return False if self.problems else True if self.examined else None

    @property
    def verdict(self) -> str:
        if self.problems:
            return f"It would NOT start: {self.problems} problem{'s' if self.problems > 1 else ''}."
        return "It would start." if self.examined else "Whether it would start was not examined."


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Doctor's options, and the flags of the server."""
    parser = argparse.ArgumentParser(
        "sglang-tailreplay doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tflops", type=float, help="bf16 matrix product of the GPU, TFLOP/s (default: measured)")
    parser.add_argument("--link-gbs", type=float, help="host memory to GPU, GB/s (default: measured)")
    parser.add_argument(
        "--assume-gpu-gb", type=float, help="plan for a GPU with so many GiB free, not for this machine's"
    )
    parser.add_argument("--assume-host-gb", type=float, help="plan for so many GiB of free host memory")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options, flags = parser.parse_known_args(argv)
    if (options.tflops is None) != (options.link_gbs is None):
        parser.error("--tflops and --link-gbs: give both, or none")
    return options, ["--model-path", options.model_path, *flags]


def examine(options: argparse.Namespace, flags: list[str]) -> Report:
    report = Report(options.model_path)
    found = diagnosis.find_device()
    if options.assume_gpu_gb is None:
        report.add(diagnosis.device(found))
    try:
        arguments = launch_server.prepare(flags)
    except TailReplayError as error:
        report.add(diagnosis.problems_of(error))
        report.add([Finding(NOTE, "the rest is checked with all --tail-replay settings at their defaults")])
        os.environ.pop(ENVIRONMENT, None)
        flags = launch_server.without_settings(flags)
        arguments = launch_server.prepare(flags)
    if BACKEND not in arguments:
        report.add([Finding(NOTE, "--tail-replay-mode off is stock SGLang, which is not examined here")])
        report.examined = False
        return report
    report.add(diagnosis.versions())
    folder = list(diagnosis.model_folder(options.model_path))
    report.add(folder)
    if folder or compat.version_problem():
        return report
    report.add(diagnosis.hooks())
    settled = diagnosis.settle(arguments)
    report.add(settled.findings)
    if settled.server_args is not None:
        look_ahead(report, settled.server_args, found, options, flags)
    return report


def find_remedy(report: Report, options: argparse.Namespace, flags: list[str], settings: str | None) -> str | None:
    """The command without the flags that problems name, if it would start. `settings`: ENVIRONMENT as it was given."""
    kept = remedy.without_named(flags, [finding.text for finding in report.findings if finding.level == PROBLEM])
    if kept == flags or compat.version_problem():
        return None
    os.environ.pop(ENVIRONMENT, None)
    if settings is not None:
        os.environ[ENVIRONMENT] = settings
    try:
        again = examine(options, kept)
    except TailReplayError:
        return None
    return None if again.problems else shlex.join([called_as(), "serve", *kept])


def called_as() -> str:
    """The console script as the operator has just called it, perhaps with the folder of its environment."""
    return sys.argv[0] if os.path.basename(sys.argv[0]) == COMMAND else COMMAND


def look_ahead(report: Report, server_args: Any, found: Device, options: argparse.Namespace, flags: list[str]) -> None:
    """Memory and costs, which need a model that fits."""
    imagined = None
    if options.assume_gpu_gb is not None:
        imagined = forecast.Imagined(options.assume_gpu_gb, given_by_user(flags))
    host = options.assume_host_gb
    try:
        outlook = forecast.make(server_args, found, imagined, free_host_bytes() if host is None else int(host * GIB))
    except TailReplayError as error:
        report.add([Finding(PROBLEM, str(error))])
        return
    except forecast.Unknown as error:
        report.add([Finding(NOTE, str(error))])
        return
    report.add(outlook.findings)
    report.sections["memory"] = outlook.memory
    speeds, missing = forecast.speeds(options.tflops, options.link_gbs, found)
    report.sections["a hit costs at least"] = forecast.costs(outlook, speeds) if speeds else [("not known", missing)]


def given_by_user(flags: list[str]) -> argparse.Namespace:
    """SGLang's arguments without what a machine without CUDA adds."""
    return compat.parse_arguments(launch_server.translate(flags, dict(os.environ)))[1]


def text(report: Report) -> str:
    lines = [f"sglang-tailreplay doctor: {report.model}", ""]
    lines += [f"  {finding.level:8} {finding.text}" for finding in report.findings]
    for title, rows in report.sections.items():
        width = max(len(what) for what, _ in rows)
        lines += ["", f"{title}:", *(f"  {what.ljust(width)}  {much}" for what, much in rows)]
    lines += ["", report.verdict]
    if report.remedy:
        lines += ["", "Without the flags that they name it would:", f"  {report.remedy}"]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    options, flags = parse(argv)
    # SGLang talks while it resolves its arguments; what matters of it is among the findings.
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    settings = os.environ.get(ENVIRONMENT)
    report = examine(options, flags)
    if report.problems:
        report.remedy = find_remedy(report, options, flags, settings)
    print(json.dumps({**asdict(report), "starts": report.starts}) if options.json else text(report))
    sys.stdout.flush()
    return 1 if report.problems else 0
