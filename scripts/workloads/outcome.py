"""What servers made of the workloads: numbers, tables, and where the first server, the one to compare with, wins.

Pure, but for `memory`, which asks a server. Standard library and this package's arithmetic only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from client import Client, Sample
from distribution import summary
from tables import markdown, table

from sglang_tailreplay.cost import Shape
from sglang_tailreplay.memory_plan import GIB, NumberBytes, state_slot_bytes

HEADER = ("workload", "server", "requests", "prompt tokens", "hit tokens", "hit %", "replayed")
HEADER += ("TTFT p50, ms", "p90", "p99", "tokens/s")
MEMORY_HEADER = ("server", "cache", "KV GiB", "KV slots", "states GiB", "state slots", "running requests")
SETTINGS = (
    "attention_backend",
    "chunked_prefill_size",
    "dtype",
    "load_format",
    "mamba_radix_cache_strategy",
    "version",
)


class Pass(NamedTuple):
    """One run of a workload on a server that began with an empty cache."""

    samples: list[Sample]
    seconds: float


def summarise(passes: Sequence[Pass]) -> dict[str, Any]:
    """Over all passes; `samples` by field, in the order in which answers ended."""
    samples = [sample for one in passes for sample in one.samples]
    seconds = sum(one.seconds for one in passes)
    prompt, cached, new = (sum(getattr(s, field) for s in samples) for field in ("prompt", "cached", "new"))
    return {
        "requests": len(samples),
        "prompt_tokens": prompt,
        "hit_tokens": cached,
        "replayed_tokens": sum(s.replayed for s in samples),
        "new_tokens": new,
        "seconds": [round(one.seconds, 3) for one in passes],
        "tokens_per_second": (prompt + new) / seconds,
        "ttft_ms": summary([s.ttft_ms for s in samples]),
        "samples": {field: [round(getattr(s, field), 2) for s in samples] for field in Sample._fields},
    }


# -------------------------------------------------------------------------------------------------------- tables


def report(results: Sequence[Mapping[str, Any]], render=table) -> str:
    return render(HEADER, [_cells(result) for result in results])


def _cells(result: Mapping[str, Any]) -> tuple:
    share = 100 * result["hit_tokens"] / result["prompt_tokens"]
    counts = (result["requests"], result["prompt_tokens"], result["hit_tokens"], share, result["replayed_tokens"])
    return (result["workload"], result["server"], *counts, *result["ttft_ms"].values(), result["tokens_per_second"])


def report_memory(facts: Mapping[str, Mapping[str, Any]], render=table) -> str:
    keys = ("backend", "kv_gib", "kv_slots", "state_gib", "state_slots", "running_requests")
    return render(MEMORY_HEADER, [(name, *(fact[key] for key in keys)) for name, fact in facts.items()])


def where_first_wins(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for every number in which the first server beats another one; one line that says so where none does.
    Nothing with one server."""
    if len({result["server"] for result in results}) < 2:
        return []
    first = results[0]["server"]
    lines = [line for pair in _pairs(results) for line in _losses(*pair)]
    return [f"Where {first} wins:", *lines] if lines else [f"{first} wins in none of these numbers."]


def _pairs(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The first server's result of a workload, with each other server's."""
    first = {result["workload"]: result for result in results if result["server"] == results[0]["server"]}
    others = (result for result in results if result["server"] != results[0]["server"])
    yield from ((first[result["workload"]], result) for result in others if result["workload"] in first)


def _losses(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    where = f"- {first['workload']}: {first['server']}"
    for name, mine in first["ttft_ms"].items():
        theirs = other["ttft_ms"][name]
        if mine < theirs:
            yield f"{where} has a TTFT {name} of {mine:,.1f} ms, {other['server']} {theirs:,.1f} ms"
    mine, theirs = first["tokens_per_second"], other["tokens_per_second"]
    if mine > theirs:
        yield f"{where} does {mine:,.0f} tokens/s, {other['server']} {theirs:,.0f}"


def page(document: Mapping[str, Any]) -> str:
    """The document as Markdown."""
    gpu = next(iter(document["machine"]["gpus"]), document["machine"]["cpu"])
    parts = [f"`{document['command']}`, commit {document['commit']}, {Path(document['shape']).name}, {gpu}"]
    parts += [report(document["results"], markdown), report_memory(document["servers"], markdown)]
    parts.append("\n".join(document["where_first_wins"]))
    return "\n\n".join(part for part in parts if part) + "\n"


# -------------------------------------------------------------------------------------------------------- memory


def memory(url: str) -> dict[str, Any]:
    """Device memory for KV and states, and the settings that matter, as /server_info tells them. The states' GiB are
    their slots times what the model's config.json says; None where that file is not on this machine."""
    client = Client(url, 0)
    info = client.info()
    state = (info.get("internal_states") or [{}])[0]
    usage = state.get("memory_usage") or {}
    slots = state.get("max_mamba_cache_size") or _slots_by_metrics(client)
    return {
        "backend": state.get("radix_cache_backend") or "stock",
        "model": info.get("model_path"),
        "kv_gib": usage.get("kvcache"),
        "kv_slots": usage.get("token_capacity"),
        "state_slots": slots,
        "state_gib": _state_gib(info.get("model_path"), slots),
        "running_requests": state.get("effective_max_running_requests_per_dp"),
        "settings": {key: info.get(key, state.get(key)) for key in SETTINGS},
    }


def _slots_by_metrics(client: Client) -> int | None:
    """Free, cached and used ones; None without --enable-metrics."""
    lines = [line for line in client.metrics() if line.startswith("sglang:mamba_") and "_tokens{" in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines)) or None


def _state_gib(model: str | None, slots: int | None) -> float | None:
    try:
        config = json.loads((Path(model or "") / "config.json").read_text())
        shape = Shape.from_config(config.get("text_config", config))
    except (OSError, ValueError, KeyError):
        return None
    return slots and round((slots + 1) * state_slot_bytes(shape, NumberBytes()) / GIB, 3)
