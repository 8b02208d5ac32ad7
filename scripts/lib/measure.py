"""The pure half of scripts/gpu_check: what is asked of which engine, what the answers mean, and how they are printed.

Standard library only, so that plans and arithmetic are tested without a GPU. engine_runner.py executes the plans."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

SECTIONS = ("capacity", "correctness", "ttft", "throughput")
ENGINES = ("stock", "tail_replay", "float16")  # float16: tail replay again, the reference of the correctness section

ENGINE_ARGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "chunked_prefill_size": 16384,
}

# SGLang's plugins by engine (an allow-list: no other plugin of this environment touches the baseline). random_weights
# replaces the dummy loader's weights, under which answers hardly depend on the prompt, by equal ones in both engines.
_WITH_TAIL_REPLAY = "tailreplay,random_weights"
PLUGINS = {"stock": "random_weights", "tail_replay": _WITH_TAIL_REPLAY, "float16": _WITH_TAIL_REPLAY}

# Three more bits of precision than bfloat16; SGLang's norms on CUDA have no float32. The convolution states have their
# own dtype.
FLOAT16_ARGS = {"dtype": "float16", "attention_backend": "triton"}
FLOAT16_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}


# ---------------------------------------------------------------------------------------------------- token plans


class Segment(NamedTuple):
    """`count` random tokens that depend on nothing but `seed`: equal segments are equal prefixes."""

    seed: str
    count: int


Prompt = tuple[Segment, ...]


def tokens(prompt: Prompt, vocab_size: int) -> list[int]:
    """The low ids are left out: special and byte tokens live there."""
    low = min(1000, vocab_size // 8)
    ids: list[int] = []
    for seed, count in prompt:
        draw = random.Random(seed)
        ids += [draw.randrange(low, vocab_size) for _ in range(count)]
    return ids


def prompt_len(prompt: Prompt) -> int:
    return sum(segment.count for segment in prompt)


class Request(NamedTuple):
    kind: str  # cold, repeat, diverge, again: what the cache has seen of the prompt before
    matched: int  # tokens of the prompt that an earlier request has computed
    ratio: float | None  # None: the engine's own
    prompt: Prompt
    timed: bool  # False: warm-up


class Batch(NamedTuple):
    kind: str
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    timed: bool


class Case(NamedTuple):
    """One comparison of a hit at `matched` with a cold prefill of the same prompt."""

    name: str
    how: str  # prefix: another request had the same first tokens; generated: cut inside an answer; turns: a chat
    matched: int  # length of the shared random prefix; the executor adds the generated tokens
    ratio: float


@dataclass(frozen=True)
class Sizes:
    """What a run measures, apart from the engine's settings."""

    lengths: tuple[int, ...] = (8226, 16418, 31847)
    suffix: int = 64
    hits: int = 20  # timed hits per length and ratio
    cold: int = 5  # timed cold prefills per length; each primes hits / cold hits
    ratios: tuple[float, ...] = (0.05, 0.10)
    short_length: int = 512
    prefill_batch: tuple[int, int] = (16, 4096)  # requests, prompt tokens
    decode_batch: tuple[int, int, int] = (32, 256, 128)  # requests, prompt tokens, new tokens
    throughput_reps: int = 5
    boundaries: tuple[int, ...] = (1, 5, 64, 1000)

    def __post_init__(self) -> None:
        if self.cold < 1 or self.hits < self.cold:
            raise ValueError(f"need 1 <= cold <= hits, got cold={self.cold}, hits={self.hits}")
        if any(not 0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"ratios must lie in (0, 1], got {self.ratios}")


def ttft_plan(sizes: Sizes, engine: str) -> list[Request]:
    """Round 0 warms up. A round sends, per length, one cold prompt of fresh tokens and then what it primed:

        cold     prefix + suffix, nothing cached
        repeat   the same prompt again
        diverge  prefix + other suffix: the first request that leaves the cached path here
        again    prefix + yet another suffix: stock SGLang may have stored a state at the branch by now
    """
    ratios = sizes.ratios if engine == "tail_replay" else (None,)
    plan = [*_short_cold(sizes)]
    for number in range(sizes.cold + 1):
        for length in sizes.lengths:
            plan += _round(sizes, length, number, ratios)
    return plan


def _short_cold(sizes: Sizes) -> Iterable[Request]:
    for number in range(sizes.hits + 2):
        prompt = (Segment(f"short/{number}", sizes.short_length),)
        yield Request("cold", 0, None, prompt, timed=number >= 2)


def _round(sizes: Sizes, length: int, number: int, ratios: Sequence[float | None]) -> list[Request]:
    prefix, timed = Segment(f"{length}/{number}/prefix", length), number > 0

    def ask(kind: str, matched: int, ratio: float | None, suffix: str) -> Request:
        prompt = (prefix, Segment(f"{length}/{number}/{suffix}", sizes.suffix))
        return Request(kind, matched, ratio, prompt, timed)

    requests = [ask("cold", 0, None, "cold"), ask("repeat", length + sizes.suffix - 1, None, "cold")]
    requests.append(ask("diverge", length, ratios[0], "diverge"))
    repeats = range(_share(sizes.hits, sizes.cold, number) if timed else 1)
    return requests + [ask("again", length, ratio, f"again/{i}/{ratio}") for i in repeats for ratio in ratios]


def _share(total: int, parts: int, number: int) -> int:
    """Size of part `number` (from 1) when `total` is split into `parts`."""
    return total // parts + (number <= total % parts)


def throughput_plan(sizes: Sizes) -> list[Batch]:
    """Fresh tokens in every prompt: no prefix is shared. Kinds alternate; repetition 0 warms up."""
    plan = []
    for number in range(sizes.throughput_reps + 1):
        count, length = sizes.prefill_batch
        plan.append(Batch("prefill", _fresh("prefill", number, count, length), 1, number > 0))
        count, length, new_tokens = sizes.decode_batch
        plan.append(Batch("decode", _fresh("decode", number, count, length), new_tokens, number > 0))
    return plan


def _fresh(kind: str, number: int, count: int, length: int) -> tuple[Prompt, ...]:
    return tuple((Segment(f"{kind}/{number}/{i}", length),) for i in range(count))


def correctness_plan(sizes: Sizes, engine: str, chunk: int) -> list[Case]:
    """The same prompts on every engine, with r = 1. Ratios below 1 are measured, not judged."""
    boundaries = [*sizes.boundaries, chunk - 1, chunk, chunk + 1]
    cases = [Case(f"m={m}", "prefix", m, 1.0) for m in boundaries]
    largest = max(sizes.boundaries)
    cases += [Case("generated", "generated", largest, 1.0), Case("turns", "turns", largest, 1.0)]
    if engine == "tail_replay":
        cases += [Case(f"m={m} r={r}", "prefix", m, r) for r in sizes.ratios for m in (largest, chunk + 1)]
    return cases


# ------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class EnginePlan:
    name: str
    args: dict[str, Any]
    env: dict[str, str]
    sections: tuple[str, ...]
    vocab_size: int
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def chunk(self) -> int:
        return self.args["chunked_prefill_size"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EnginePlan:
        sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in data["sizes"].items()}
        return cls(**{**data, "sections": tuple(data["sections"]), "sizes": Sizes(**sizes)})


def describe(plan: EnginePlan) -> list[str]:
    """What --dry-run prints."""
    lines = [f"engine {plan.name}", f"  args {plan.args}", f"  env  {plan.env}"]
    for section in plan.sections:
        lines += [f"  {section}: {line}" for line in _describe_section(plan, section)]
    return lines


def _describe_section(plan: EnginePlan, section: str) -> list[str]:
    if section == "ttft":
        requests = ttft_plan(plan.sizes, plan.name)
        groups: dict[tuple, int] = {}
        for request in requests:
            key = (prompt_len(request.prompt), request.kind, request.matched, request.ratio)
            groups[key] = groups.get(key, 0) + request.timed
        lines = [f"{count:3} x {_request_text(*key)}" for key, count in groups.items()]
        return [*lines, f"{len(requests)} requests, warm-up included"]
    if section == "throughput":
        return [_batch_text(batch) for batch in throughput_plan(plan.sizes) if batch.timed]
    if section == "correctness":
        cases = correctness_plan(plan.sizes, plan.name, plan.chunk)
        return [f"{case.name} ({case.how}, r={case.ratio})" for case in cases]
    return ["server info, GPU and host memory"]


def _request_text(length: int, kind: str, matched: int, ratio: float | None) -> str:
    return f"{kind} of {length} tokens, {matched} seen before" + (f", r={ratio}" if ratio else "")


def _batch_text(batch: Batch) -> str:
    return f"{batch.kind}: {len(batch.prompts)} x {prompt_len(batch.prompts[0])} in, {batch.max_new_tokens} out"


# ---------------------------------------------------------------------------------------------------- arithmetic


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "p50": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def plugin_int(meta_info: Mapping[str, Any], what: str) -> int | None:
    """What the plugin tells about an answer: matched, replayed or generation. None where it tells nothing (a miss, or
    stock SGLang)."""
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


class Difference(NamedTuple):
    max_abs: float  # over the log-probabilities that both answers name
    kl: float  # of the first from the second, over those tokens and one bucket for the rest
    positions: int  # new tokens compared: up to and including the first one that differs
    same_tokens: bool


Position = Mapping[int, float]  # token -> log-probability


def difference(
    tokens_a: Sequence[int], tokens_b: Sequence[int], a: Sequence[Position], b: Sequence[Position]
) -> Difference:
    """Later positions depend on the earlier tokens, so they count only while the tokens agree."""
    agree = next((i for i, (x, y) in enumerate(zip(tokens_a, tokens_b, strict=True)) if x != y), len(tokens_a))
    positions = min(agree + 1, len(a))
    pairs = [(a[i], b[i]) for i in range(positions)]
    return Difference(
        max_abs=max(_max_abs(p, q) for p, q in pairs),
        kl=max(_kl(p, q) for p, q in pairs),
        positions=positions,
        same_tokens=agree == len(tokens_a),
    )


def _common(p: Position, q: Position) -> list[int]:
    common = sorted(p.keys() & q.keys())
    if not common:
        raise ValueError("the two answers name no common token")
    return common


def _max_abs(p: Position, q: Position) -> float:
    return max(abs(p[token] - q[token]) for token in _common(p, q))


def _kl(p: Position, q: Position) -> float:
    common = _common(p, q)
    first, second = [math.exp(p[t]) for t in common], [math.exp(q[t]) for t in common]
    first.append(max(1.0 - sum(first), 1e-12))
    second.append(max(1.0 - sum(second), 1e-12))
    return sum(x * math.log(x / y) for x, y in zip(first, second, strict=True) if x > 0)


FLOOR = 1e-3  # bf16 log-probabilities near zero: below this a difference says nothing


Cases = Sequence[Mapping[str, Any]]


def judge(tail: Cases, stock: Cases, float16: Cases) -> list[dict[str, Any]]:
    """Per case at r=1 the hit must reach its boundary with a tail that is all of it. Then, on the first new token:

    float16      hit against cold prefill: within 5% of what another prefix changes
    tail_replay  hit against the float16 cold prefill: at most twice the largest error of its own cold prefills, which
                 is what rounding costs in this dtype; only where the prompt does not depend on earlier answers
    stock        only shown

    blind: a prompt with another prefix looks the same too, so agreement proves nothing."""
    truth = {case["name"]: case["cold_first"] for case in float16 if case["how"] == "prefix"}
    rows = [{**case, "engine": "stock", "error": None, "allowed": None, "verdict": "reference"} for case in stock]
    for case in float16:
        allowed = case["control_vs_cold"]["max_abs"] / 20
        rows.append({**case, "engine": "float16", **_verdict(case, case["hit_vs_cold"]["max_abs"], allowed)})
    rounding = [_max_abs(case["cold_first"], truth[case["name"]]) for case in tail if case["name"] in truth]
    allowed = max(2 * max(rounding), FLOOR) if rounding else None
    for case in tail:
        known = case["name"] in truth
        error = _max_abs(case["hit_first"], truth[case["name"]]) if known else None
        rows.append({**case, "engine": "tail_replay", **_verdict(case, error, allowed if known else None)})
    return rows


def _verdict(case: Mapping[str, Any], error: float | None, allowed: float | None) -> dict[str, Any]:
    control = case["control_vs_cold"]["max_abs"]
    blind = allowed is not None and control <= 2 * allowed
    if case["cached"] < case["matched"]:
        verdict = "SHORT HIT"
    elif case["ratio"] < 1:
        verdict = "measured"
    elif case["replayed"] is None or case["replayed"] < case["cached"]:
        verdict = "SHORT TAIL"
    elif allowed is None:
        verdict = "measured"
    elif error > allowed:
        verdict = "WRONG"
    else:
        verdict = "blind" if blind else "ok"
    return {"error": error, "allowed": allowed, "verdict": verdict}


FAILING = ("SHORT HIT", "SHORT TAIL", "WRONG")


# -------------------------------------------------------------------------------------------------------- report


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


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Left-aligned text, right-aligned numbers, two spaces between columns."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [text.rjust(w) if right else text.ljust(w) for text, w, right in zip(row, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.1f}"
    if isinstance(value, list):
        return ",".join(map(_cell, value)) or "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "", 1).replace("e-", "", 1).lstrip("-").isdigit()


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
