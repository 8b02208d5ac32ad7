"""The paper's Table 2 on this machine: time to the first token of a prompt whose first tokens are cached, stock SGLang
and tail replay, KV on the host and on the GPU, beside full prefill, the paper's speed-ups and what FLOPs and
bytes allow.

    scripts/bench_ttft --model-shape qwen3.5-4b --out h200-qwen3.5-4b-ttft.json
    scripts/bench_ttft --model-shape qwen3.6-27b --engines stock --only hits --cold 8 --hits 8 --out stock.json
    scripts/bench_ttft --model-shape qwen3.6-27b --engines host,host-ser --add stock.json --out h200-qwen3.6-27b.json
    scripts/bench_ttft --model-shape qwen3.6-27b --engines none --add a.json --add b.json --out both.json
    scripts/bench_ttft --model-shape qwen3.5-4b --dry-run --start-seconds 100 --cold-ms 150,329,673 --hit-ms 60

Engines, each a process of its own (70 to 130 s of start on an H200):

    stock          SGLang without this project
    host           HiCache on: KV pushed to the host before each hit, then the same with KV on the GPU; H2D-OVL+skip
    host-ovl       the same, H2D-OVL: the last FFN of each group is computed
    host-ser       the same, H2D-SER: copies, replay and forward one after the other, nothing skipped
    resident[-ovl|-ser]  without HiCache, KV on the GPU
    anchored       as host, with a state saved every 1,024 tokens: hits are exact, whatever the ratio

Where MEASURE_TURN names a file, several calls at once start their engines side by side and measure one after the other.

Weights are random: times are those of the shape. Results are written after each engine. The exit code is non-zero when
anything in the document's "problems" is."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import bench_plan
import bench_print
import bench_report
import engine_process
import paper
from arguments import add_common, model_config, model_folder, model_plugins, names, numbers, python_path, settings
from bench_plan import BenchPlan, Estimates, Kind, Sizes
from engine_process import Limits
from measure import ENGINE_ARGS
from origin import need_gpu, origin

from sglang_tailreplay import speed
from sglang_tailreplay.cost import Speeds

ALL = tuple(bench_plan.ENGINES)
SECTIONS = tuple(section for section in bench_plan.SECTIONS if section != "trace")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench_ttft", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_common(parser, "bench_ttft.json")
    engines = bench_plan.DEFAULT_ENGINES
    which = f"of {','.join(ALL)}; or none; {','.join(engines)}"
    parser.add_argument("--engines", type=_engines, default=engines, help=which)
    parser.add_argument("--only", type=names(SECTIONS), default=SECTIONS, metavar="SECTION,...")
    parser.add_argument("--trace", type=names(ALL), default=(), metavar="ENGINE,...", help="record two hits each")
    add = {"type": Path, "action": "append", "default": [], "metavar": "DOCUMENT"}
    parser.add_argument("--add", **add, help="take its engines too: of an earlier call, same shape and machine")
    _add_sizes(parser)
    parser.add_argument("--tflops", type=float, help="of a bf16 matrix product; measured unless given with --link-gbs")
    parser.add_argument("--link-gbs", type=float, help="GB/s from pinned host memory to the GPU")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds until an engine must be ready")
    parser.add_argument("--engine-seconds", type=float, default=280, help="time limit per engine, from then on")
    parser.add_argument("--total-seconds", type=float, default=math.inf, help="the last engines get what is left")
    guess = parser.add_argument_group("for the times that --dry-run prints, all three or none")
    guess.add_argument("--start-seconds", type=float)
    guess.add_argument("--cold-ms", type=numbers(float), help="full prefill, one number per length")
    guess.add_argument("--hit-ms", type=float)
    options = parser.parse_args(argv)
    options.lengths = options.lengths or paper.lengths(options.model_shape)
    options.burst_length = options.burst_length or options.lengths[0]
    _check(parser, options)
    return options


def _engines(text: str) -> tuple[str, ...]:
    """`none` where documents are only to be put together."""
    return () if text == "none" else names(ALL)(text)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    parser.add_argument("--lengths", type=numbers(int), help="matched prefixes, in tokens; the paper's for the shape")
    parser.add_argument("--ratios", type=numbers(float), default=sizes.ratios, help="the first one is the engine's")
    parser.add_argument("--sources", type=names(sizes.sources), default=sizes.sources, help="where the KV of hits lies")
    parser.add_argument("--hits", type=int, default=sizes.hits, help="timed hits per length, ratio and source")
    parser.add_argument("--cold", type=int, default=sizes.cold, help="timed cold prefills per length, stock")
    parser.add_argument(
        "--primes", type=int, default=sizes.primes, help="timed cold prefills per length, other engines"
    )
    parser.add_argument("--bursts", type=numbers(int), default=sizes.bursts, help="requests at once")
    parser.add_argument("--burst-length", type=int, help="shared tokens of these; the shortest length")
    parser.add_argument("--burst-rounds", type=int, default=sizes.burst_rounds)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.tflops is None) != (options.link_gbs is None):
        parser.error("--tflops and --link-gbs: give both, or none to have them measured")
    if set(options.trace) - set(options.engines):
        parser.error(f"--trace: {', '.join(options.trace)} must be among --engines")
    if not options.engines and not options.add:
        parser.error("--engines none: nothing to put together without --add")
    if options.cold_ms and len(options.cold_ms) != len(options.lengths):
        parser.error(f"--cold-ms: one number per length, {len(options.lengths)} of them")


# --------------------------------------------------------------------------------------------------------- plans


def sizes_of(options: argparse.Namespace) -> Sizes:
    fields = ("lengths", "ratios", "hits", "cold", "primes", "sources", "bursts", "burst_length", "burst_rounds")
    return Sizes(**{field: getattr(options, field) for field in fields})


def plans(options: argparse.Namespace) -> list[BenchPlan]:
    return [_plan(options, name, bench_plan.ENGINES[name]) for name in options.engines]


def _plan(options: argparse.Namespace, name: str, kind: Kind) -> BenchPlan:
    model = model_folder(options)
    args = {"model_path": str(model), **ENGINE_ARGS}
    plugins = ["random_weights", *model_plugins(model_config(model))]
    env = {"PYTHONPATH": python_path("weights_plugin", "eviction_plugin")}
    if kind.tail_replay:
        args |= bench_plan.TAIL_REPLAY_ARGS
        plugins = [*{*plugins, "tailreplay"}]
        config = {"mode": "replay", "ratio": options.ratios[0], **kind.config}
        env["SGLANG_TAILREPLAY"] = json.dumps(config | settings(options.config, name, json.loads, ALL))
    if kind.host_tier:
        args |= bench_plan.HOST_TIER_ARGS
        plugins.append("device_eviction")
    args |= settings(options.engine_arg, name, json.loads, ALL)
    env |= {"SGLANG_PLUGINS": ",".join(sorted(plugins)), **settings(options.engine_env, name, str, ALL)}
    traced = name in options.trace
    file = options.out.resolve().with_suffix(f".{name}{bench_plan.TRACE_ENDING}") if traced else None
    sections = (*options.only, *(("trace",) if traced else ()))
    vocab_size = model_config(model)["vocab_size"]
    return BenchPlan(name, args, env, sections, vocab_size, sizes_of(options), str(file) if file else None)


def estimates_of(options: argparse.Namespace) -> Estimates | None:
    given = (options.start_seconds, options.cold_ms, options.hit_ms)
    return None if None in given else Estimates(*given)


def describe(chosen: list[BenchPlan], estimates: Estimates | None) -> list[str]:
    lines = [line for plan in chosen for line in bench_plan.describe(plan, estimates)]
    if estimates:
        total = sum(sum(bench_plan.estimated_seconds(plan, estimates).values()) for plan in chosen)
        lines.append(f"all engines: {total:.0f} s, and some seconds to measure the machine")
    return lines


# ------------------------------------------------------------------------------------------------------ executing


def speeds_of(options: argparse.Namespace) -> Speeds | None:
    """Given, or measured; None, with a word, on a machine that can measure none."""
    if options.tflops is not None:
        return Speeds(options.tflops, options.link_gbs, "given")
    try:
        return speed.measured()
    except RuntimeError as error:
        print(f"no bounds: {error}; give --tflops and --link-gbs", flush=True)
        return None


def main() -> int:
    options = parse()
    chosen = plans(options)
    if options.dry_run:
        print("\n".join(describe(chosen, estimates_of(options))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine's group is killed too
    options.out.resolve().parent.mkdir(parents=True, exist_ok=True)
    head = {"tool": "bench_ttft", **origin("scripts/bench_ttft", options), "sizes": sizes_of(options).__dict__}
    if chosen:
        need_gpu(head["machine"])
    else:  # nothing is measured here
        head["machine"] = json.loads(options.add[0].read_text())["machine"]
    began, engines = time.monotonic(), added(options.add, head)
    config, speeds = model_config(model_folder(options)), speeds_of(options)

    def reported() -> dict[str, Any]:
        report = bench_report.assemble(head, config, speeds, engines, time.monotonic() - began)
        write(report, options.out)
        return report

    report = reported() if not chosen else {}
    for plan in chosen:
        left = options.total_seconds - (time.monotonic() - began)
        limits = Limits(options.start_limit, options.engine_seconds, left)
        engines[plan.name] = engine_process.run_engine(plan, "bench_runner", options.out, limits)
        report = reported()  # after each engine: a later one may be cut off
    print(f"\n{bench_print.print_report(report)}\n\nwritten to {options.out}")
    return 1 if report["problems"] else 0


def added(documents: list[Path], head: dict[str, Any]) -> dict[str, Any]:
    """Engines of earlier documents, with where they come from. SystemExit for a document that cannot be compared."""
    engines = {}
    for path in documents:
        report = json.loads(path.read_text())
        for what, theirs, ours in bench_report.differences(report, json.loads(json.dumps(head))):
            raise SystemExit(f"--add {path}: {what} is {theirs}, here {ours}")
        source = {key: report[key] for key in ("date", "commit", "command")}
        engines |= {name: {"added_from": source, **engine} for name, engine in report["engines"].items()}
    return engines


def write(report: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
