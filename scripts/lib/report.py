"""What gpu_check's samples add up to: summaries, JSON document and printed report. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from correctness import FAILING, judge
from tables import table


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "p50": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def told(meta_info: Mapping[str, Any], what: str) -> Any:
    """What the plugin tells about an answer: matched, replayed, generation or start. None where it tells nothing (a
    miss, or stock SGLang)."""
    return (meta_info.get("cached_tokens_details") or {}).get(f"tail_replay_{what}")


def summarise_ttft(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per (prompt length, kind, ratio). `cached` and `replayed` list every distinct value that was seen."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["prompt_tokens"], sample["kind"], sample["ratio"]), []).append(sample)
    return [_ttft_row(key, group) for key, group in groups.items()]


def _ttft_row(key: tuple, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    prompt_tokens, kind, ratio = key
    return {
        "prompt_tokens": prompt_tokens,
        "kind": kind,
        "ratio": ratio,
        "matched": group[0]["matched"],
        "cached": sorted({sample["cached"] for sample in group}),
        "replayed": sorted({sample["replayed"] for sample in group if sample["replayed"] is not None}),
        "ms": spread([sample["ms"] for sample in group]),
    }


def short_hits(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in which an answer reused less than was there: with this project, any of them is a failure."""
    return [row for row in rows if row["cached"][0] < row["matched"]]


def summarise_throughput(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Tokens per second: prompt tokens for prefill, new tokens of the whole request time for decode."""
    rates: dict[str, list[float]] = {}
    for sample in samples:
        counted = sample["prompt_tokens"] if sample["kind"] == "prefill" else sample["new_tokens"]
        rates.setdefault(sample["kind"], []).append(counted / sample["seconds"])
    return {kind: spread(values) for kind, values in rates.items()}


def section_result(engines: Mapping[str, Any], engine: str, section: str) -> Any:
    """None where it was not run or failed."""
    return engines.get(engine, {}).get("sections", {}).get(section, {}).get("result")


def assemble(
    header: Mapping[str, Any], engines: Mapping[str, Any], unit: Mapping[str, Any] | None, wall_seconds: float
) -> dict[str, Any]:
    """The JSON document. `problems` is empty exactly when the run may be quoted."""
    cases = judge(*(section_result(engines, name, "correctness") or [] for name in ("tail_replay", "stock", "float16")))
    # The log-probabilities have served their purpose; the differences stay.
    engines, cases = _without(engines, "hit_first", "cold_first"), _without(cases, "hit_first", "cold_first")
    report = {"schema": 1, **header, "unit": unit, "engines": engines, "correctness": cases}
    report["problems"] = list(problems(report))
    report["wall_seconds"] = round(wall_seconds, 1)
    return report


def _without(data: Any, *keys: str) -> Any:
    """A copy of nested dicts and lists that lacks the keys."""
    if isinstance(data, Mapping):
        return {key: _without(value, *keys) for key, value in data.items() if key not in keys}
    return [_without(value, *keys) for value in data] if isinstance(data, list) else data


def problems(report: Mapping[str, Any]) -> Iterable[str]:
    if report["unit"] and report["unit"]["returncode"] != 0:
        yield f"unit: pytest ended with {report['unit']['returncode']}"
    for name, engine in report["engines"].items():
        if engine.get("error"):
            yield f"{name}: {engine['error']}"
        for section, outcome in engine.get("sections", {}).items():
            if not outcome["ok"]:
                yield f"{name} {section}: {outcome['error'].strip().splitlines()[-1]}"
    for case in report["correctness"]:
        if case["verdict"] in FAILING:
            yield f"correctness {case['name']}: {case['verdict']}"
    for row in short_hits(section_result(report["engines"], "tail_replay", "ttft") or []):
        yield f"ttft {row['kind']} of {row['prompt_tokens']}: cached {row['cached'][0]} of {row['matched']}"


def print_report(report: Mapping[str, Any]) -> str:
    engines = report["engines"]
    parts = [_ttft_table(engines), _throughput_table(engines), _capacity_table(engines)]
    parts.append(_correctness_table(report["correctness"]))
    text = "\n\n".join(part for part in parts if part)
    return "\n".join([text, *(f"PROBLEM {problem}" for problem in report["problems"])])


def _ttft_table(engines: Mapping[str, Any]) -> str:
    header = ("prompt", "request", "engine", "r", "cached", "replayed", "p50 ms", "min", "max", "n")
    rows = [
        (row["prompt_tokens"], row["kind"], name, row["ratio"], row["cached"], row["replayed"])
        + tuple(row["ms"][key] for key in ("p50", "min", "max", "n"))
        for name in engines
        for row in section_result(engines, name, "ttft") or []
    ]
    order = {kind: i for i, kind in enumerate(("cold", "repeat", "diverge", "again"))}
    rows.sort(key=lambda row: (row[0], order[row[1]], row[2] != "stock"))
    return table(header, rows) if rows else ""


def _throughput_table(engines: Mapping[str, Any]) -> str:
    results = {name: section_result(engines, name, "throughput") for name in engines}
    rows = [
        (kind, name, rate["p50"], rate["min"], rate["max"], _against(results.get("stock"), kind, rate))
        for name, result in results.items()
        for kind, rate in (result or {}).items()
    ]
    return table(("no shared prefix", "engine", "tok/s p50", "min", "max", "of stock"), sorted(rows)) if rows else ""


def _against(stock: Mapping[str, Any] | None, kind: str, rate: Mapping[str, float]) -> str | None:
    return f"{rate['p50'] / stock[kind]['p50']:.1%}" if stock and kind in stock else None


def _capacity_table(engines: Mapping[str, Any]) -> str:
    rows = []
    for name in engines:
        result = section_result(engines, name, "capacity")
        if result:
            rows.append((name, result["max_total_num_tokens"], result["gpu_used_mib"], result["host_used_gib"]))
    return table(("engine", "KV slots", "GPU MiB", "host GiB"), rows) if rows else ""


def _correctness_table(cases: Sequence[Mapping[str, Any]]) -> str:
    header = ("engine", "case", "boundary", "cached", "replayed", "hit - cold", "KL")
    header += ("error", "allowed", "other prefix", "")
    rows = [
        tuple(case[key] for key in ("engine", "name", "matched", "cached", "replayed"))
        + (case["hit_vs_cold"]["max_abs"], case["hit_vs_cold"]["kl"], case["error"], case["allowed"])
        + (case["control_vs_cold"]["max_abs"], case["verdict"])
        for case in cases
    ]
    return table(header, rows) if rows else ""
