"""What servers made of the workloads, from a document of scripts/workload: TTFT, and what was cached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_tailreplay.figure import save_figure


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Bars are medians, their whiskers end at p99. A server is a colour; workloads that it did not run leave a gap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {(result["workload"], result["server"]): result for result in document["results"]}
    workloads, servers = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    width = 0.8 / len(servers)
    figure, (times, hits) = pyplot.subplots(1, 2, figsize=(11, 4))
    for number, server in enumerate(servers):
        there = [(x, found[name, server]) for x, name in enumerate(workloads) if (name, server) in found]
        x = [place - 0.4 + width * (number + 0.5) for place, _ in there]
        p50 = [result["ttft_ms"]["p50"] for _, result in there]
        above = [result["ttft_ms"]["p99"] - result["ttft_ms"]["p50"] for _, result in there]
        times.bar(x, p50, width, yerr=([0] * len(x), above), capsize=2, label=server, error_kw={"linewidth": 0.8})
        hits.bar(x, [100 * result["hit_tokens"] / result["prompt_tokens"] for _, result in there], width)
    times.set(ylabel="time to first token, ms: p50, whisker p99", yscale="log")
    hits.set(ylabel="prompt tokens from the cache, %", ylim=(0, 100))
    for axes in (times, hits):
        axes.set_xticks(range(len(workloads)), workloads)
        axes.grid(True, axis="y", alpha=0.25)
    times.legend(fontsize=8)
    gpus = document["machine"]["gpus"]
    machine = gpus[0].split(",")[0] if gpus else document["machine"]["cpu"]
    figure.suptitle(f"{Path(document['shape']).name}, {machine}", fontsize=10)
    save_figure(figure, out)
