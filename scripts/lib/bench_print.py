"""bench_ttft's document as Markdown, for stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench_plan import ENGINES
from bench_report import NEEDED, NEEDED_SHORTEST
from report import section_result
from tables import markdown


def print_report(report: Mapping[str, Any]) -> str:
    parts = [_origin(report), _table_2(report), _against_bound(report), _bursts(report), _long_tail(report)]
    parts += [_verdicts(report), "\n".join(f"PROBLEM {problem}" for problem in report["problems"])]
    return "\n\n".join(part for part in parts if part)


def _origin(report: Mapping[str, Any]) -> str:
    machine, speeds = report["machine"], report["speeds"]
    gpu = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    lines = [f"{report['shape']}, {gpu}, SGLang {machine['sglang']}, commit {report['commit']}"]
    suffix = report["sizes"]["suffix"]
    lines.append(f"Latency of a whole request with {suffix} new prompt tokens and one generated token.")
    for name, engine in report["engines"].items():
        if source := engine.get("added_from"):
            lines.append(f"{name}: measured in another call, {source['date']}, commit {source['commit']}")
    if speeds:
        lines.append(f"{speeds['tflops']:.0f} TFLOP/s, {speeds['link_gbs']:.1f} GB/s host to GPU ({speeds['origin']})")
    return "\n".join(lines)


def _ms(spread: Mapping[str, float] | None) -> str:
    return f"{spread['mean']:.1f} ({spread['min']:.1f}–{spread['max']:.1f})" if spread else "-"


def _row(engines: Mapping[str, Any], engine: str, kind: str, length: int) -> Mapping[str, Any] | None:
    rows = section_result(engines, engine, "hits") or []
    return next((row for row in rows if row["kind"] == kind and row["length"] == length), None)


def column(cell: Mapping[str, Any]) -> str:
    where = "KV on the host" if cell["source"] == "host" else "KV on the GPU"
    tier = ", host tier on" if cell["source"] == "device" and ENGINES[cell["engine"]].host_tier else ""
    ratio = "" if ENGINES[cell["engine"]].exact else f" r={cell['ratio']:.0%}"
    return f"{cell['variant']}{ratio}, {where}{tier}"


def _table_2(report: Mapping[str, Any]) -> str:
    engines, lengths = report["engines"], report["sizes"]["lengths"]
    ours = next((name for name in engines if ENGINES[name].tail_replay), None)
    columns = list(dict.fromkeys(column(cell) for cell in report["cells"]))
    by_place = {(cell["length"], column(cell)): cell for cell in report["cells"]}
    rows = []
    for length in lengths:
        cold, own = (_row(engines, name, "cold", length) if name else None for name in ("stock", ours))
        row = [length, _ms(cold and cold["ms"]), _ms(own and own["ms"])]
        row += [_stock_cache(_row(engines, "stock", kind, length)) for kind in ("diverge", "again")]
        rows.append([*row, *(_cell(by_place.get((length, name))) for name in columns)])
    header = ["matched", "full prefill, stock", f"full prefill, {ours}"]
    header += ["stock cache, first to diverge", "stock cache, next", *columns]
    return "Mean ms (min–max), speed-up over the faster full prefill.\n\n" + markdown(header, rows)


def _stock_cache(row: Mapping[str, Any] | None) -> str:
    return f"{_ms(row['ms'])}, {','.join(map(str, row['cached']))} cached" if row else "-"


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return _ms(cell["ms"]) + (f" {cell['speedup']:.2f}x" if cell["speedup"] else "")


def _against_bound(report: Mapping[str, Any]) -> str:
    header = ("matched", "", "replayed", "mean ms", "replay", "copy", "suffix", "bound ms", "reached")
    header += ("speed-up", "paper's", "of paper's")
    rows = []
    for cell in report["cells"]:
        limit = cell["bound"] or {}
        parts = [limit.get(key) for key in ("replay_ms", "copy_ms", "suffix_ms", "ms")]
        reached = f"{limit['reached']:.0%}" if limit else None
        ours = [f"{cell[key]:.2f}x" if cell[key] else None for key in ("speedup", "paper_speedup", "of_paper")]
        rows.append([cell["length"], column(cell), cell["replayed"], cell["ms"]["mean"], *parts, reached, *ours])
    return "Bound: the larger of replay and copy, plus the suffix.\n\n" + markdown(header, rows) if rows else ""


def _bursts(report: Mapping[str, Any]) -> str:
    header = (
        "at once",
        "prefixes",
        "engine",
        "KV",
        "cached",
        "TTFT p50",
        "p99",
        "max",
        "n",
        "prompt tok/s",
        "new tok/s",
    )
    rows: list[Sequence[Any]] = []
    for engine in report["engines"]:
        for row in section_result(report["engines"], engine, "bursts") or []:
            ms = row["ttft_ms"] or {}
            times = [ms.get(key) for key in ("p50", "p99", "max", "n")]
            rates = [row["prompt_tokens_per_s"], row["new_tokens_per_s"]]
            rows.append([row["requests"], row["variant"], engine, row["source"], row["cached"], *times, *rates])
    rows.sort(key=lambda row: (row[1], row[0]))
    length = report["sizes"]["burst_length"]
    return f"Requests at once, {length:,} tokens shared, ms.\n\n" + markdown(header, rows) if rows else ""


def _long_tail(report: Mapping[str, Any]) -> str:
    return "\n".join(
        f"Long tail, {line['engine']}, KV on the {line['source']}, {line['length']:,} tokens: "
        f"r={line['ratios'][1]:.0%} costs {line['measured_ms']:.1f} ms more than r={line['ratios'][0]:.0%}; "
        f"FLOPs predict {line['predicted_ms']:.1f}; unexplained {line['unexplained_ms']:.1f}"
        for line in report["long_tail"]
    )


def _verdicts(report: Mapping[str, Any]) -> str:
    return "\n".join(map(_verdict, report["verdicts"]))


def _verdict(line: Mapping[str, Any]) -> str:
    word = "PASS" if line["passed"] else "FAIL"
    wanted = f"{NEEDED:g}x the paper's speed-up in every cell, {NEEDED_SHORTEST:g}x at the shortest prefix"
    short = f"; short: {', '.join(line['short'])}" if line["short"] else ""
    return f"{word} {line['engine']}, KV on the {line['source']}: {wanted} ({line['cells']} cells){short}"
