"""README.md and docs/results/README.md quote what the documents beside them hold: the tables of times and workloads."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
README, PAGE = (ROOT / "README.md").read_text(), (RESULTS / "README.md").read_text()
MODELS = ("qwen3.5-4b", "qwen3.6-27b")
LENGTHS = (8226, 16418, 31847)


def load(name: str) -> dict:
    return json.loads((RESULTS / f"h200-{name}.json").read_text())


class Times:
    """A document of scripts/bench_ttft."""

    def __init__(self, model: str):
        self.document = load(f"{model}-ttft")

    def cell(self, engine: str, source: str, length: int, ratio: float = 0.05) -> dict:
        wanted = (engine, source, length, ratio)
        (cell,) = (c for c in self.document["cells"] if (c["engine"], c["source"], c["length"], c["ratio"]) == wanted)
        return cell

    def ms(self, *wanted) -> str:
        return brief(self.cell(*wanted)["ms"]["mean"])

    def faster(self, length: int, ratio: float) -> str:
        cell = self.cell("host", "host", length, ratio)
        return f"{cell['speedup']:.1f} x ({cell['paper_speedup']:.1f})"

    def stock(self, length: int) -> tuple[str, int]:
        """Of a prompt that leaves a cached one, and tokens found in the cache."""
        for asked in self.document["engines"]["stock"]["sections"]["hits"]["result"]:
            if (asked["kind"], asked["length"]) == ("diverge", length):
                return f"{asked['ms']['mean']:,.0f}", asked["cached"][0]
        raise KeyError(length)


def brief(ms: float) -> str:
    return f"{ms:.1f}" if ms < 99.95 else f"{ms:,.0f}"


@pytest.mark.parametrize("model", MODELS)
def test_the_paper_s_table(model):
    times = Times(model)
    for length in LENGTHS:
        stock, cached = times.stock(length)
        full = min(times.document["full_prefill_ms"][str(length)].values())
        row = [f"{length:,}", f"{full:,.0f}", f"{stock} ({cached:,}{'' if cached else ' cached'})"]
        row += [times.ms("host-ser", "host", length), times.ms("host-ovl", "host", length)]
        row += [f"{times.ms('host', 'host', length, r)}, {times.faster(length, r)}" for r in (0.05, 0.1)]
        row += [times.ms("host", "device", length, r) for r in (0.05, 0.1)]
        assert f"| {' | '.join(row)} |" in PAGE


@pytest.mark.parametrize("model", MODELS)
def test_hits_on_saved_states(model):
    times = Times(model)
    for length in LENGTHS:
        replayed = times.cell("anchored", "host", length)["replayed"][0]
        row = [f"{length:,}", f"{replayed}", *(times.ms("anchored", source, length) for source in ("host", "device"))]
        row += [*(times.ms("host", "host", length, r) for r in (0.05, 0.1)), times.stock(length)[0]]
        assert f"| {' | '.join(row)} |" in PAGE


@pytest.mark.parametrize("model", MODELS)
def test_the_readme(model):
    times, engines = Times(model), load(model)["engines"]
    slots = {name: engines[name]["sections"]["capacity"]["result"] for name in ("stock", "tail_replay")}
    slots = {name: f"{result['memory_usage']['token_capacity']:,}" for name, result in slots.items()}
    stock = [f"{ms} ({cached:,})" for ms, cached in map(times.stock, LENGTHS)]
    full = [f"{times.document['full_prefill_ms'][str(length)]['stock']:,.0f}" for length in LENGTHS]
    rows = [["full prefill, stock", *full, ""], ["stock", *stock, slots["stock"]]]
    for r, capacity in ((0.05, slots["tail_replay"]), (0.1, "")):
        hits = [times.cell("host", "host", length, r)["ms"]["mean"] for length in LENGTHS]
        said = [f"{ms:.0f}, {times.faster(length, r)}" for ms, length in zip(hits, LENGTHS, strict=True)]
        rows.append([f"tail replay, r = {r:.0%}".replace("%", " %"), *said, capacity])
    page = README.replace("(paper ", "(")
    for row in rows:
        assert f"| {' | '.join(row)} |".replace("|  |", "| |") in page


def test_requests_at_once():
    engines = Times("qwen3.5-4b").document["engines"]
    bursts = [engines[name]["sections"]["bursts"]["result"] for name in ("stock", "host")]
    for stock, ours in zip(*bursts, strict=True):
        at_once, variant = stock["requests"], stock["variant"]
        assert (ours["requests"], ours["variant"]) == (at_once, variant)
        digits = 1 if at_once == 1 else 0
        a, b = stock["ttft_ms"], ours["ttft_ms"]
        shown = f"{a['p50']:,.0f} / {a['p99']:,.0f} | {b['p50']:.{digits}f} / {b['p99']:.{digits}f}"
        prefixes = "one" if variant == "same" else "its own" if at_once == 1 else "their own"
        assert f"| {at_once} | {prefixes} | {shown} |" in PAGE


def test_workloads():
    for r in load("qwen3.5-4b-workloads")["results"]:
        first = r["server"] == "stock"
        share = f" ({r['hit_tokens'] / r['prompt_tokens']:.0%})".replace("%", " %") if r["hit_tokens"] else ""
        row = [r["workload"] if first else "", "stock" if first else "tail replay", str(r["requests"])]
        row += [f"{r['prompt_tokens']:,}", f"{r['hit_tokens']:,}{share}"]
        row += ["" if first else f"{r['replayed_tokens']:,}"]
        row += [f"{r['ttft_ms'][p]:,.0f}" for p in ("p50", "p90", "p99")] + [f"{r['tokens_per_second']:,.0f}"]
        assert f"| {' | '.join(row)} |".replace("|  |", "| |") in PAGE
