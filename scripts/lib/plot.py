"""Draw the figures of docs/: each from the file that holds what it shows, and beside it, as .svg and .png.

scripts/plot docs/results/h200-qwen3.5-4b-ttft.json      a document of bench_ttft: table2-SHAPE
scripts/plot docs/results/h200-qwen3.5-4b.json           of gpu_check: ttft-SHAPE
scripts/plot docs/results/simulation-mooncake-synthetic.json    of simulate: its own name
scripts/plot docs/results/h200-quality-m24.json          report.json of eval_quality or eval_turns, states.json
                                                         of state_errors: quality-, turns- and states-MODEL
scripts/plot workloads.json                              of workload: workloads-SHAPE
scripts/plot hit.8226.trace.json.gz                      a trace of a hit, as scripts/timeline: its name, .timeline
scripts/plot --mechanism docs/mechanism.svg              no data: the picture of docs/how-it-works.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plot_mechanism
import plot_ttft
import plot_workloads
import simulate
import timeline
from quality import plot as plot_quality
from quality import turns_report


class Figure(NamedTuple):
    path: Path  # .svg; the .png has the same name
    draw: Callable[[Mapping[str, Any], Path], None]


def figure_of(path: Path, document: Mapping[str, Any]) -> Figure:
    """ValueError for a document that has no figure."""
    if "curve" in document:
        return Figure(path.with_suffix(".svg"), _simulation)
    shape = f"{Path(document.get('shape') or '').name}.svg"
    if (tool := document.get("tool")) in QUALITY:
        name, draw = QUALITY[tool]
        return Figure(path.with_name(f"{name}-{shape}"), draw)
    if tool == "workload":
        return Figure(path.with_name(f"workloads-{shape}"), plot_workloads.draw)
    if plot_ttft.is_bench(document):
        return Figure(path.with_name(f"table2-{shape}"), plot_ttft.draw)
    if any(plot_ttft.series(document).values() if "engines" in document else ()):
        return Figure(path.with_name(f"ttft-{shape}"), plot_ttft.draw)
    raise ValueError(f"{path}: nothing to draw; there are figures of {', '.join(KINDS)}")


KINDS = (
    *("bench_ttft", "gpu_check with its section ttft", "simulate", "workload", "traces of a hit"),
    *("eval_quality", "eval_turns", "state_errors"),
)


def _simulation(document: Mapping[str, Any], out: Path) -> None:
    title = f"{document['traces']}: {document['requests']:,} requests, chunks of {document['chunk']:,}"
    simulate.draw(document["curve"], title, out)


def _quality(document: Mapping[str, Any], out: Path) -> None:
    plot_quality.draw(document["cuts"], Path(document["shape"]).name, out)


def _turns(document: Mapping[str, Any], out: Path) -> None:
    turns_report.draw(document, Path(document["shape"]).name, out)


def _states(document: Mapping[str, Any], out: Path) -> None:
    import state_errors  # brings torch

    for suffix in (".svg", ".png"):
        state_errors.draw(document, out.with_suffix(suffix))


QUALITY = {  # tool -> name of its figure, how that is drawn
    "eval_quality": ("quality", _quality),
    "eval_turns": ("turns", _turns),
    "state_errors": ("states", _states),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--mechanism", type=Path, metavar="OUT", help="draw how a hit works")
    options = parser.parse_args(argv)
    if not options.files and not options.mechanism:
        parser.error("name a file, or --mechanism OUT")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.mechanism:
        print(*plot_mechanism.draw(options.mechanism))
    for path in options.files:
        if ".trace.json" in path.name:
            timeline.main([str(path)])
            continue
        document = json.loads(path.read_text())
        try:
            figure = figure_of(path, document)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        figure.draw(document, figure.path)
        print(f"{figure.path} and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
