"""What scripts/gpu_check asks of which engine.

Standard library only, so that plans are tested without a GPU. check_runner.py executes them; correctness.py and
report.py say what the answers mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from prompts import Prompt, Segment, prompt_len, share

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
_WITH_TAIL_REPLAY = ("tailreplay", "random_weights")
PLUGINS = {"stock": ("random_weights",), "tail_replay": _WITH_TAIL_REPLAY, "float16": _WITH_TAIL_REPLAY}

# Three more bits of precision than bfloat16; SGLang's norms on CUDA have no float32. The convolution states have their
# own dtype.
FLOAT16_ARGS = {"dtype": "float16", "attention_backend": "triton"}
FLOAT16_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}


# ---------------------------------------------------------------------------------------------------- token plans


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
    repeats = range(share(sizes.hits, sizes.cold, number) if timed else 1)
    return requests + [ask("again", length, ratio, f"again/{i}/{ratio}") for i in repeats for ratio in ratios]


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
