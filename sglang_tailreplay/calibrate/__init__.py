"""sglang-tailreplay calibrate --model-path M [--prompts FILE] [--out FILE] [any flag of `serve`]

Measures on the model itself, through a real server, what a hit loses against cold prefill: the share of next tokens
that agree and the KL of their distributions, for every tail and anchor interval of a grid, at several prefix lengths.
Prints a table, draws a plot, and writes a JSON file; `serve --tail-replay-calibration FILE` takes its settings from it.

Exit code 0: a setting was found that is good enough at every length; 1: none was, and the file says why; 2: it could
not be measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_tailreplay import calibration
from sglang_tailreplay.calibrate import judge, plan, prompts, report
from sglang_tailreplay.calibrate.runner import Found, Task, run
from sglang_tailreplay.config import CONV_WIDTH, TailReplayConfig, add_flags
from sglang_tailreplay.errors import TailReplayError


def main(argv: Sequence[str]) -> int:
    options, config, flags = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server's group is ended, too
    try:
        return _calibrate(options, config, flags, shlex.join(["sglang-tailreplay", "calibrate", *argv]))
    except TailReplayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, TailReplayConfig, list[str]]:
    """Own options, the settings of the servers but for what is measured, and SGLang's flags for them."""
    parser = argparse.ArgumentParser(
        "sglang-tailreplay calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    _add_options(parser)
    settings = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(settings)
    options, rest = parser.parse_known_args(argv)
    given, flags = settings.parse_known_args(rest)
    measured = [key for key in (*calibration.MEASURED, "mode") if key in vars(given)]
    if measured:
        name = measured[0].replace("_", "-")
        parser.error(f"--tail-replay-{name} is what is measured: say which values with the options above")
    if min(options.count, options.concurrency, options.suffix, *options.lengths) < 1:
        parser.error("--count, --concurrency, --suffix and --lengths must be positive")
    if min(options.lengths) <= options.suffix:
        parser.error(f"--lengths: {min(options.lengths)} must be more than the {options.suffix} tokens of --suffix")
    if not all(0 < ratio <= 1 for ratio in options.ratios):
        parser.error("--ratios must lie in (0, 1]")
    if min(options.min_tokens) < CONV_WIDTH:
        parser.error(f"--min-tokens must be at least {CONV_WIDTH}")
    if not 0 < options.agreement <= 1:
        parser.error("--agreement must lie in (0, 1]")
    try:
        # Some server has the longest interval, so that a size for its states is not refused.
        own = {**vars(given), "anchor_interval": max(options.anchor_intervals)}
        return options, TailReplayConfig.from_environment(os.environ, **own), flags
    except TailReplayError as error:
        parser.error(str(error))


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", required=True)
    add("--prompts", type=Path, metavar="FILE", help='JSONL with "prompt" or "input_ids"; without: generated ones')
    add("--out", type=Path, default=Path("calibration.json"), help="also .svg and .png (calibration.json)")
    lengths = "matched tokens; with anchors, boundaries are spread over the last interval before (1024,4096,8192)"
    add("--lengths", type=_list(int), default=(1024, 4096, 8192), help=lengths)
    add("--ratios", type=_list(float), default=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0), help="(0.02,0.05,0.1,0.2,0.5,1)")
    add("--min-tokens", type=_list(int), default=(64, 256), help="(64,256)")
    add("--max-tokens", type=_list(_count_or_none), default=(None,), help="numbers, or none (none)")
    add("--anchor-intervals", type=_list(int), default=(0, 2048), help="0: no anchors; each is a server (0,2048)")
    add("--agreement", type=float, default=0.95, help="wanted share of agreeing next tokens (0.95)")
    add("--max-kl", type=float, help="wanted limit of the mean KL, nats (none)")
    add("--count", type=int, default=24, help="prompts per length (24)")
    add("--suffix", type=int, default=16, help="new tokens behind the boundary, all of them compared (16)")
    add("--seed", type=int, default=0, help="of boundaries and generated prompts")
    add("--concurrency", type=int, default=2)
    add("--ready-seconds", type=float, default=1800, help="time limit for the start of a server")


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        return tuple(dict.fromkeys(kind(word) for word in text.split(",")))

    parse.__name__ = "list of numbers"
    return parse


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def _calibrate(options: argparse.Namespace, config: TailReplayConfig, flags: list[str], command: str) -> int:
    folder = calibration.model_folder(options.model_path)
    settings = plan.grid(options.ratios, options.min_tokens, options.max_tokens, options.anchor_intervals)
    if not settings:
        raise TailReplayError("--max-tokens are all below --min-tokens: nothing to measure")
    vocab_size = _vocab_size(folder)
    asked = _prompts(options, vocab_size)
    lengths = [length for length in options.lengths if asked[length]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = Found()
    if lengths:
        grid = plan.cells(settings, lengths)
        task = Task(
            options.model_path, config, flags, asked, options.suffix, grid, vocab_size, options.concurrency,
            options.ready_seconds, options.out.parent,
        )  # fmt: skip
        found = run(task)
    scores = {cell: judge.score(samples) for cell, samples in found.samples.items()}
    wanted = judge.Wanted(options.agreement, options.max_kl)
    verdict = judge.recommend(settings, options.lengths, scores, wanted)
    kept = {key: getattr(config, key) for key in calibration.KEPT}
    document = _document(options, folder, command, scores, wanted, verdict, found.errors, kept)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    _tell(options, document, scores, verdict)
    return 0 if verdict.setting else 1


def _prompts(options: argparse.Namespace, vocab_size: int) -> dict[int, list[list[int]]]:
    """By length. Their boundaries depend on nothing but the options."""
    spread = (options.anchor_intervals, options.suffix, options.count, options.seed)
    boundaries = {n: plan.boundaries(n, *spread) for n in options.lengths}
    if options.prompts is None:
        print(prompts.GENERATED, flush=True)
        return {n: prompts.generated(boundaries[n], options.suffix, vocab_size, options.seed) for n in options.lengths}
    own = prompts.read(options.prompts, options.model_path)
    chosen = {n: prompts.cut(own, boundaries[n], options.suffix) for n in options.lengths}
    for length, found in chosen.items():
        print(f"{len(found)} of {len(own)} prompts have {length} + {options.suffix} tokens", flush=True)
    return chosen


def _vocab_size(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text())
        return config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        raise TailReplayError(f"--model-path {folder}: config.json tells no vocab_size ({error!r})") from None


def _document(
    options: argparse.Namespace,
    folder: Path,
    command: str,
    scores: dict[plan.Cell, judge.Score],
    wanted: judge.Wanted,
    verdict: judge.Verdict,
    errors: list[str],
    kept: dict[str, Any],
) -> dict[str, Any]:
    cells = [{**cell._asdict(), **scores[cell]._asdict()} for cell in sorted(scores)]
    return {
        "tool": calibration.TOOL,
        "format": calibration.FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": _device(),
        "versions": calibration.versions(),
        "model": {"path": options.model_path, "fingerprint": calibration.fingerprint(folder)},
        "prompts": "generated" if options.prompts is None else str(options.prompts),
        "wanted": wanted._asdict(),
        "recommendation": {**verdict.setting._asdict(), **kept} if verdict.setting else None,
        "verdict": verdict.reason,
        "errors": errors,
        "cells": cells,
    }


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _tell(options: argparse.Namespace, document: dict, scores: dict, verdict: judge.Verdict) -> None:
    drawn = report.draw(scores, Path(options.model_path).name, options.agreement, options.out) if scores else []
    print(f"\n{report.table(scores)}\n" if scores else "")
    for error in document["errors"][:5]:
        print(f"not counted: {error}")
    written = ", ".join(map(str, (options.out, *drawn)))
    if verdict.setting:
        print(f"recommended: {judge.describe(verdict.setting)}\n  {verdict.reason}\n  prompts: {document['prompts']}")
        print(f"written: {written}; start with {calibration.FLAG} {options.out}")
    else:
        print(f"nothing is recommended: {verdict.reason}\nwritten: {written}")
