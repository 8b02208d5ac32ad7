"""One run on a GPU: stock SGLang and tail replay, each in one engine, compared in one JSON document.

    scripts/gpu_check --model-shape qwen3.5-4b --out results.json
    scripts/gpu_check --model-shape qwen3.6-27b --hits 10 --cold 3 --throughput-reps 3 --out results.json
    scripts/gpu_check --model-shape qwen3.5-4b --dry-run

Weights are random (SGLang's dummy loader): times and memory are those of the shape, answers mean nothing. The exit code
is non-zero when anything in the document's "problems" is."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import measure
from measure import EnginePlan, Sizes

SCRIPTS = Path(__file__).resolve().parents[1]
CHECKOUT = SCRIPTS.parent
DISTRIBUTIONS = ("torch", "triton", "sglang", "flashinfer-python", "flash-linear-attention")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-shape", choices=sorted(p.parent.name for p in SCRIPTS.glob("shapes/*/config.json")))
    model.add_argument("--model-path", help="a folder with a config.json (engine argument load_format: auto)")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--only", type=_names(measure.SECTIONS), default=measure.SECTIONS, metavar="SECTION,...")
    parser.add_argument("--engines", type=_names(measure.ENGINES), default=measure.ENGINES, metavar="ENGINE,...")
    parser.add_argument("--unit", action="store_true", help="run `pytest -m gpu tests/cuda_streams` first")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs no GPU")
    parser.add_argument("--commit", default=os.environ.get("GIT_COMMIT"), help="where the checkout has no .git")
    _add_sizes(parser)
    setting = {"action": "append", "default": [], "metavar": "[ENGINE:]KEY=JSON"}
    parser.add_argument("--engine-arg", **setting, help="of sglang.Engine, for both engines or one")
    parser.add_argument("--engine-env", action="append", default=[], metavar="[ENGINE:]NAME=VALUE")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=JSON", help="of SGLANG_TAILREPLAY")
    parser.add_argument("--engine-seconds", type=float, default=280, help="time limit per engine, start included")
    parser.add_argument("--unit-seconds", type=float, default=240)
    return parser.parse_args(argv)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    parser.add_argument("--lengths", type=_numbers(int), default=sizes.lengths, help="matched prefixes, in tokens")
    parser.add_argument("--ratios", type=_numbers(float), default=sizes.ratios, help="the first one is the engine's")
    parser.add_argument("--hits", type=int, default=sizes.hits, help="timed hits per length and ratio")
    parser.add_argument("--cold", type=int, default=sizes.cold, help="timed cold prefills per length")
    parser.add_argument("--throughput-reps", type=int, default=sizes.throughput_reps)
    parser.add_argument("--prefill-batch", type=_numbers(int), default=sizes.prefill_batch, help="REQUESTS,IN")
    parser.add_argument("--decode-batch", type=_numbers(int), default=sizes.decode_batch, help="REQUESTS,IN,OUT")
    parser.add_argument("--boundaries", type=_numbers(int), default=sizes.boundaries, help="beside those at the chunk")


def _names(allowed: tuple[str, ...]):
    def split(text: str) -> tuple[str, ...]:
        names = text.split(",")
        if unknown := set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} not in {', '.join(allowed)}")
        return tuple(name for name in allowed if name in names)

    return split


def _numbers(kind: type):
    return lambda text: tuple(kind(part) for part in text.split(","))


# --------------------------------------------------------------------------------------------------------- plans


def sizes_of(options: argparse.Namespace) -> Sizes:
    fields = ("lengths", "ratios", "hits", "cold", "throughput_reps", "prefill_batch", "decode_batch", "boundaries")
    return Sizes(**{field: getattr(options, field) for field in fields})


def plans(options: argparse.Namespace) -> list[EnginePlan]:
    model = Path(options.model_path or SCRIPTS / "shapes" / options.model_shape).resolve()
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return [_plan(options, name, model, vocab_size) for name in options.engines]


def _plan(options: argparse.Namespace, name: str, model: Path, vocab_size: int) -> EnginePlan:
    args = {"model_path": str(model), **measure.ENGINE_ARGS}
    search = [str(SCRIPTS / "lib" / "weights_plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"SGLANG_PLUGINS": measure.PLUGINS[name], "PYTHONPATH": os.pathsep.join(search)}
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
    """KEY=VALUE for every engine, ENGINE:KEY=VALUE for one."""
    chosen = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit(f"gpu_check: {pair!r} is not KEY=VALUE")
        owner, colon, rest = key.partition(":")
        if colon and owner not in measure.ENGINES:
            raise SystemExit(f"gpu_check: {pair!r}: no engine is called {owner!r}")
        if not colon or owner == engine:
            chosen[rest or key] = read(value)
    return chosen


# ------------------------------------------------------------------------------------------------------ executing


def run_engine(plan: EnginePlan, out: Path, limit: float) -> dict[str, Any]:
    log = out.with_suffix(f".{plan.name}.log")
    print(f"[{plan.name}] starting, at most {limit:.0f} s, log in {log}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(json.dumps(plan.to_json()))
        ended = _run_child(plan, Path(folder), log, limit)
        result = Path(folder) / "out.json"
        outcome = json.loads(result.read_text()) if result.exists() else {"sections": {}, "error": "no result"}
    if outcome["error"]:
        outcome |= {"error": f"{outcome['error']}, {ended}", "log_tail": tail(log)}
        print(f"[{plan.name}] FAILED: {outcome['error']}; its log ends with\n{outcome['log_tail']}", flush=True)
    wall = round(time.monotonic() - start, 1)
    # Paths of this machine mean nothing to a reader.
    args = {**plan.args, "model_path": str(Path(plan.args["model_path"]).name)}
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    return {"args": args, "env": env, "wall_seconds": wall, "log": log.name, **outcome}


def _run_child(plan: EnginePlan, folder: Path, log: Path, limit: float) -> str:
    """Run engine_runner.py in its own process group and leave nothing of it behind. Returns how it ended."""
    progress = os.dup(sys.stdout.fileno())
    command = [sys.executable, SCRIPTS / "lib" / "engine_runner.py", folder / "plan.json", folder / "out.json"]
    env = {key: value for key, value in os.environ.items() if key != "SGLANG_TAILREPLAY"} | plan.env
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [*map(str, command), str(progress)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(progress,),
        )
    try:
        return f"exit code {child.wait(limit)}"
    except subprocess.TimeoutExpired:
        return f"killed at the limit of {limit:.0f} s"
    finally:
        os.close(progress)
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


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


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# --------------------------------------------------------------------------------------------------------- origin


def machine() -> dict[str, Any]:
    gpus = first_output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "gpus": gpus.splitlines() if gpus else [],
        "cuda": _torch_cuda(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in DISTRIBUTIONS},
    }


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def first_output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_of(options: argparse.Namespace) -> dict[str, Any]:
    """`dirty` is None where git cannot tell."""
    changed = first_output("git", "status", "--porcelain")
    head = options.commit or first_output("git", "rev-parse", "HEAD")
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def header(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["scripts/gpu_check", *sys.argv[1:]]),
        **commit_of(options),
        "shape": options.model_shape or options.model_path,
        "machine": machine(),
        "sizes": sizes_of(options).__dict__,
    }


def main() -> int:
    options = parse()
    chosen = plans(options)
    if options.dry_run:
        print("\n".join(line for plan in chosen for line in measure.describe(plan)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine's group is killed too
    options.out.resolve().parent.mkdir(parents=True, exist_ok=True)
    began, engines, head = time.monotonic(), {}, header(options)
    unit = run_unit(options.unit_seconds) if options.unit else None
    for plan in chosen:
        engines[plan.name] = run_engine(plan, options.out, options.engine_seconds)
        report = measure.assemble(head, engines, unit, time.monotonic() - began)
        options.out.write_text(json.dumps(report, indent=1) + "\n")  # after each engine: a later one may be cut off
    print(f"\n{measure.print_report(report)}\n\nwritten to {options.out}")
    return 1 if report["problems"] else 0
