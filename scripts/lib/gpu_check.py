"""One run on a GPU: stock SGLang and tail replay, each in one engine, compared in one JSON document.

    scripts/gpu_check --model-shape qwen3.5-4b --out results.json
    scripts/gpu_check --model-shape qwen3.6-27b --hits 10 --cold 3 --throughput-reps 3 --out results.json
    scripts/gpu_check --model-shape qwen3.5-4b --dry-run

Weights are random (SGLang's dummy loader): times and memory are those of the shape, answers mean nothing. The exit code
is non-zero when anything in the document's "problems" is."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_process
import measure
import report as reports
from arguments import CHECKOUT, add_common, model_config, model_folder, model_plugins, names, numbers, python_path
from arguments import settings as settings_of
from engine_process import Limits
from measure import EnginePlan, Sizes
from origin import need_gpu, origin


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_common(parser, "gpu_check.json")
    parser.add_argument("--only", type=names(measure.SECTIONS), default=measure.SECTIONS, metavar="SECTION,...")
    parser.add_argument("--engines", type=names(measure.ENGINES), default=measure.ENGINES, metavar="ENGINE,...")
    parser.add_argument("--unit", action="store_true", help="run the unit tests marked gpu first")
    _add_sizes(parser)
    parser.add_argument("--start-limit", type=float, default=300, help="seconds until an engine must be ready")
    parser.add_argument("--engine-seconds", type=float, default=280, help="time limit per engine, from then on")
    parser.add_argument("--total-seconds", type=float, default=math.inf, help="the last engines get what is left")
    parser.add_argument("--unit-seconds", type=float, default=240)
    return parser.parse_args(argv)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    parser.add_argument("--lengths", type=numbers(int), default=sizes.lengths, help="matched prefixes, in tokens")
    parser.add_argument("--ratios", type=numbers(float), default=sizes.ratios, help="the first one is the engine's")
    parser.add_argument("--hits", type=int, default=sizes.hits, help="timed hits per length and ratio")
    parser.add_argument("--cold", type=int, default=sizes.cold, help="timed cold prefills per length")
    parser.add_argument("--throughput-reps", type=int, default=sizes.throughput_reps)
    parser.add_argument("--prefill-batch", type=numbers(int), default=sizes.prefill_batch, help="REQUESTS,IN")
    parser.add_argument("--decode-batch", type=numbers(int), default=sizes.decode_batch, help="REQUESTS,IN,OUT")
    parser.add_argument("--boundaries", type=numbers(int), default=sizes.boundaries, help="beside those at the chunk")


# --------------------------------------------------------------------------------------------------------- plans


def sizes_of(options: argparse.Namespace) -> Sizes:
    fields = ("lengths", "ratios", "hits", "cold", "throughput_reps", "prefill_batch", "decode_batch", "boundaries")
    return Sizes(**{field: getattr(options, field) for field in fields})


def plans(options: argparse.Namespace) -> list[EnginePlan]:
    model = model_folder(options)
    return [_plan(options, name, model, model_config(model)) for name in options.engines]


def _plan(options: argparse.Namespace, name: str, model: Path, config: Mapping[str, Any]) -> EnginePlan:
    vocab_size, plugins = config["vocab_size"], {*measure.PLUGINS[name], *model_plugins(config)}
    args = {"model_path": str(model), **measure.ENGINE_ARGS}
    env = {"SGLANG_PLUGINS": ",".join(sorted(plugins)), "PYTHONPATH": python_path("weights_plugin")}
    if name != "stock":
        args["radix_cache_backend"] = "tail_replay"
        config = {"ratio": options.ratios[0], "mode": "replay", **settings(options.config, name, json.loads)}
        env["SGLANG_TAILREPLAY"] = json.dumps(config)
    sections = options.only
    if name == "float16":
        args, env, sections = args | measure.FLOAT16_ARGS, env | measure.FLOAT16_ENV, ("correctness",)
    args |= settings(options.engine_arg, name, json.loads)
    env |= settings(options.engine_env, name, str)
    return EnginePlan(name, args, env, sections, vocab_size, sizes_of(options))


def settings(pairs: list[str], engine: str, read: Any) -> dict[str, Any]:
    return settings_of(pairs, engine, read, measure.ENGINES)


# ------------------------------------------------------------------------------------------------------ executing


def run_unit(limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/cuda_streams", "tests/replay/test_kernels.py"]
    print(f"[unit] {shlex.join(command[1:])}", flush=True)
    start = time.monotonic()
    env = {**os.environ, "PYTHONSAFEPATH": "1"}  # or the checkout would shadow an installed package
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=env, timeout=limit, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = -1, f"{(error.stdout or b'').decode(errors='replace')}\nkilled at the limit of {limit:.0f} s"
    last = text.strip().splitlines()[-1:]
    print(f"[unit] exit code {code}: {' '.join(last)}", flush=True)
    outcome = {"command": shlex.join(command[1:]), "returncode": code, "summary": " ".join(last)}
    return {**outcome, "output": text[-8000:], "wall_seconds": round(time.monotonic() - start, 1)}


def main() -> int:
    options = parse()
    chosen = plans(options)
    if options.dry_run:
        print("\n".join(line for plan in chosen for line in measure.describe(plan)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine's group is killed too
    options.out.resolve().parent.mkdir(parents=True, exist_ok=True)
    began, engines = time.monotonic(), {}
    head = {**origin("scripts/gpu_check", options), "sizes": sizes_of(options).__dict__}
    need_gpu(head["machine"])
    unit = run_unit(options.unit_seconds) if options.unit else None
    for plan in chosen:
        limits = Limits(options.start_limit, options.engine_seconds, options.total_seconds - (time.monotonic() - began))
        engines[plan.name] = engine_process.run_engine(plan, "check_runner", options.out, limits)
        report = reports.assemble(head, engines, unit, time.monotonic() - began)
        options.out.write_text(json.dumps(report, indent=1) + "\n")  # after each engine: a later one may be cut off
    print(f"\n{reports.print_report(report)}\n\nwritten to {options.out}")
    return 1 if report["problems"] else 0
