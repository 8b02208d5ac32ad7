"""What bench_ttft's samples add up to: cells beside their bounds and the paper's, verdicts, the JSON document. Standard
library and sglang_tailreplay.cost only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import paper
from bench_plan import ENGINES
from report import section_result, spread

from sglang_tailreplay.cost import Shape, Speeds, bound

NEEDED, NEEDED_SHORTEST = 1.5, 2.0  # of the paper's speed-up: in every cell, and in those of the shortest prefix


# ------------------------------------------------------------------------------------------------------ summaries


def summarise_hits(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per (kind, length, ratio, source); `ms` is None where every sample was rejected."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[key] for key in ("kind", "length", "ratio", "source")), []).append(sample)
    return [_hit_row(key, group) for key, group in groups.items()]


def _hit_row(key: tuple, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = [sample for sample in group if sample["rejected"] is None]
    kind, length, ratio, source = key
    return {
        "kind": kind,
        "length": length,
        "ratio": ratio,
        "source": source,
        "cached": sorted({sample["cached"] for sample in good}),
        "replayed": sorted({sample["replayed"] for sample in good if sample["replayed"] is not None}),
        "rejected": len(group) - len(good),
        "ms": spread([sample["ms"] for sample in good]) if good else None,
    }


def summarise_bursts(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per (variant, requests at once), over all requests of all rounds. Tokens per second: of the whole burst,
    prompt tokens (cached ones included) and new tokens."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["variant"], sample["source"], len(sample["ttft_ms"])), []).append(sample)
    rows = []
    for (variant, source, count), group in groups.items():
        good = [sample for sample in group if sample["rejected"] is None]
        times = [ms for sample in good for ms in sample["ttft_ms"]]
        rows.append(
            {
                "variant": variant,
                "source": source,
                "requests": count,
                "cached": sorted({cached for sample in good for cached in sample["cached"]}),
                "rejected": len(group) - len(good),
                "ttft_ms": {**spread(times), "p99": quantile(times, 0.99)} if times else None,
                "prompt_tokens_per_s": _rate(good, "prompt_tokens"),
                "new_tokens_per_s": _rate(good, "new_tokens"),
            }
        )
    return rows


def _rate(samples: Sequence[Mapping[str, Any]], what: str) -> float | None:
    seconds = sum(sample["seconds"] for sample in samples)
    return sum(sample[what] for sample in samples) / seconds if samples else None


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of all values does not exceed."""
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]


# ---------------------------------------------------------------------------------------------------------- cells


Engines = Mapping[str, Any]


def _rows(engines: Engines, engine: str, kind: str) -> list[Mapping[str, Any]]:
    result = section_result(engines, engine, "hits") or []
    return [row for row in result if row["kind"] == kind and row["ms"]]


def full_prefill(engines: Engines) -> dict[int, dict[str, float]]:
    """Length -> engine -> mean ms of a cold prompt."""
    means: dict[int, dict[str, float]] = {}
    for engine in engines:
        for row in _rows(engines, engine, "cold"):
            means.setdefault(row["length"], {})[engine] = row["ms"]["mean"]
    return means


def suffix_only(engines: Engines, length: int) -> dict[str, Any] | None:
    """The fastest measured forward pass of a suffix after a cached prefix: stock SGLang's, at the chunk end nearest
    to `length` (its time hardly depends on the prefix), or this project's with the shortest tail; None without."""
    found = []
    whole = [row for row in _rows(engines, "stock", "aligned") if row["cached"] == [row["length"]]]
    if whole:
        row = min(whole, key=lambda row: abs(row["length"] - length))
        found.append({"ms": row["ms"]["mean"], "of": f"stock after {row['length']} tokens, no replay"})
    for engine in engines:
        for row in _rows(engines, engine, "suffix"):
            if row["length"] == length:
                tail = max(row["replayed"])
                found.append({"ms": row["ms"]["mean"], "of": f"{engine} with {tail} tokens replayed"})
    return min(found, key=lambda item: item["ms"]) if found else None


def cells(engines: Engines, shape_name: str | None, shape: Shape | None, speeds: Speeds | None) -> list[dict[str, Any]]:
    """Every hit of tail replay, beside the fastest full prefill of the run, the paper's cell and the bound."""
    full = full_prefill(engines)
    found = []
    for engine in engines:
        for row in _rows(engines, engine, "hit"):
            fastest = min(full.get(row["length"], {}).values(), default=None)
            variant = ENGINES[engine].variant
            published = paper.speedup(shape_name, row["length"], row["ratio"], variant)
            speedup = fastest / row["ms"]["mean"] if fastest else None
            found.append(
                {
                    **{key: row[key] for key in ("length", "ratio", "source", "replayed", "ms")},
                    **{"engine": engine, "variant": variant, "full_ms": fastest, "speedup": speedup},
                    "paper_speedup": published,
                    "of_paper": speedup / published if speedup and published else None,
                    "bound": _bound(engines, engine, row, shape, speeds),
                }
            )
    return sorted(found, key=lambda cell: (cell["length"], cell["ratio"]))


def _bound(engines: Engines, engine: str, row: Mapping, shape: Shape | None, speeds: Speeds | None) -> dict | None:
    suffix = suffix_only(engines, row["length"])
    if shape is None or speeds is None or suffix is None:
        return None
    limit = bound(
        shape,
        speeds,
        matched=row["length"],
        tail=min(row["replayed"]),
        skip=ENGINES[engine].config["skip"],
        from_host=row["source"] == "host",
        suffix_ms=suffix["ms"],
    )
    return {**asdict(limit), "suffix_of": suffix["of"], "ms": limit.ms, "reached": limit.ms / row["ms"]["mean"]}


def long_tail(cells: Sequence[Mapping], shape: Shape | None, speeds: Speeds | None) -> list[dict[str, Any]]:
    """Per engine and source, at the longest prefix: what the largest ratio costs more than the smallest, and what of
    that its floating-point operations explain."""
    lines = []
    longest = max((cell["length"] for cell in cells), default=0)
    for engine, source in dict.fromkeys((cell["engine"], cell["source"]) for cell in cells):
        row = {c["ratio"]: c for c in cells if (c["engine"], c["source"], c["length"]) == (engine, source, longest)}
        if len(row) < 2 or shape is None or speeds is None:
            continue
        low, high = row[min(row)], row[max(row)]
        extra = min(high["replayed"]) - min(low["replayed"])
        predicted = shape.replay_flops(extra, ENGINES[engine].config["skip"]) / speeds.tflops / 1e9
        measured = high["ms"]["mean"] - low["ms"]["mean"]
        lines.append(
            {
                **{"engine": engine, "source": source, "length": longest, "ratios": [low["ratio"], high["ratio"]]},
                **{"measured_ms": measured, "predicted_ms": predicted, "unexplained_ms": measured - predicted},
            }
        )
    return lines


def verdicts(cells: Sequence[Mapping]) -> list[dict[str, Any]]:
    """Per engine and source: whether every cell reaches its multiple of the paper's speed-up for the same cell."""
    lines = []
    for engine, source in dict.fromkeys((cell["engine"], cell["source"]) for cell in cells):
        judged = [c for c in cells if (c["engine"], c["source"]) == (engine, source) and c["of_paper"] is not None]
        if not judged:
            continue
        shortest = min(cell["length"] for cell in judged)
        short = [
            f"{cell['length']} r={cell['ratio']}: {cell['of_paper']:.2f}x"
            for cell in judged
            if cell["of_paper"] < (NEEDED_SHORTEST if cell["length"] == shortest else NEEDED)
        ]
        lines.append({"engine": engine, "source": source, "cells": len(judged), "passed": not short, "short": short})
    return lines


# ------------------------------------------------------------------------------------------------------- document


def assemble(
    header: Mapping[str, Any], config: Mapping[str, Any], speeds: Speeds | None, engines: Engines, wall_seconds: float
) -> dict[str, Any]:
    """The JSON document. `problems` is empty exactly when the run may be quoted."""
    try:
        shape, unknown = Shape.from_config(config), []
    except (KeyError, ValueError) as error:
        shape, unknown = None, [f"no bounds: {error!r} in the model's config"]
    table = cells(engines, header["shape"], shape, speeds)
    return {
        "schema": 1,
        **header,
        "speeds": asdict(speeds) if speeds else None,
        "full_prefill_ms": full_prefill(engines),
        "cells": table,
        "long_tail": long_tail(table, shape, speeds),
        "verdicts": verdicts(table),
        "engines": engines,
        "problems": [*unknown, *problems(engines)],
        "wall_seconds": round(wall_seconds, 1),
    }


def differences(report: Mapping[str, Any], head: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """(what, in the report, here) of all that must be equal for the engines of two calls to be compared. How many GPUs
    the machine has does not matter: an engine has one."""
    for part, keys in _COMPARED.items():
        theirs, ours = (document[part] if part else document for document in (report, head))
        for key in keys:
            one, other = theirs.get(key), ours.get(key)
            if (set(one) != set(other)) if key == "gpus" else (one != other):
                yield key, one, other


_COMPARED = {
    "": ("tool", "shape"),
    "machine": ("gpus", "cpu", "torch", "sglang"),
    "sizes": ("lengths", "suffix", "burst_length", "burst_new_tokens"),
}


def problems(engines: Engines) -> Iterable[str]:
    for name, engine in engines.items():
        if engine.get("error"):
            yield f"{name}: {engine['error']}"
        for section, outcome in engine.get("sections", {}).items():
            if not outcome["ok"]:
                yield f"{name} {section}: {outcome['error'].strip().splitlines()[-1]}"
            rejected = [sample["rejected"] for sample in outcome["samples"] if sample.get("rejected")]
            if rejected:
                yield f"{name} {section}: {len(rejected)} samples rejected, the first one: {rejected[0]}"
