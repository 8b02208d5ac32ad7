"""What scripts/bench_ttft asks of which engine, and what an answer must say to count. Pure.

Every ablation is a setting of an engine, so each is an engine of its own. Engines with a host tier serve every hit
twice: from the host, after all KV was pushed out of the GPU, and then from the GPU, where the first one has just
brought it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paper
from prompts import Prompt, Segment, share

from sglang_tailreplay.replay.tail import tail_length
from sglang_tailreplay.replay_rule import EXACT

DEVICE, HOST = "device", "host"  # where the KV of a hit lies
SAVED = "saved states"  # variant that the paper does not have
SECTIONS = ("capacity", "hits", "bursts", "trace")
TRACE_ENDING = ".trace.json.gz"
SHORTEST = 1e-6  # a ratio so small that only min_tokens are replayed: the nearest to a forward pass of the suffix alone


class Kind(NamedTuple):
    """One engine: stock SGLang, or this project with settings of SGLANG_TAILREPLAY."""

    tail_replay: bool
    host_tier: bool = False
    config: dict[str, bool | int] = {}
    variant: str = ""  # column of the paper's Table 2
    exact: bool = False  # every hit begins at a saved state, whatever the ratio

    @property
    def sources(self) -> tuple[str, ...]:
        return (HOST, DEVICE) if self.host_tier else (DEVICE,)


_BEST = {"overlap": True, "skip": True}
_VARIANTS = {
    "": (_BEST, paper.SKIP),
    "-ovl": ({"overlap": True, "skip": False}, paper.OVERLAP),
    "-ser": ({"overlap": False, "skip": False}, paper.SERIAL),
}
ENGINES: dict[str, Kind] = {
    "stock": Kind(False),
    **{f"resident{end}": Kind(True, False, *settings) for end, settings in _VARIANTS.items()},
    **{f"host{end}": Kind(True, True, *settings) for end, settings in _VARIANTS.items()},
    "anchored": Kind(True, True, _BEST | {"anchor_interval": 1024}, SAVED, exact=True),
}
DEFAULT_ENGINES = ("stock", "host", "host-ser")  # the paper's Table 2

# Small pools start fast (pinning host memory takes 0.3 s a GB) and hold all that is asked of them: 16 requests at
# once, and three prefixes with some suffixes. Stock SGLang keeps its defaults.
TAIL_REPLAY_ARGS = {"radix_cache_backend": "tail_replay", "max_total_tokens": 196_608}
HOST_TIER_ARGS = {"enable_hierarchical_cache": True, "hicache_ratio": 1.5, "hicache_write_policy": "write_through"}


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...] = paper.OTHER_LENGTHS
    suffix: int = 64
    hits: int = 20  # timed hits per length, ratio and source
    cold: int = 20  # timed cold prefills per length of stock, each with the first prompt that leaves its path
    primes: int = 5  # the same of the other engines; their hits are spread over them
    ratios: tuple[float, ...] = paper.RATIOS
    sources: tuple[str, ...] = (HOST, DEVICE)
    bursts: tuple[int, ...] = (1, 4, 16)  # requests at once
    burst_length: int = 8226
    burst_rounds: int = 3
    burst_new_tokens: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.primes <= self.hits or not 1 <= self.cold:
            raise ValueError(f"need 1 <= primes <= hits and 1 <= cold, got {self.primes}, {self.hits}, {self.cold}")
        if any(not 0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"ratios must lie in (0, 1], got {self.ratios}")
        if not set(self.sources) <= {HOST, DEVICE}:
            raise ValueError(f"sources are {HOST} and {DEVICE}, got {self.sources}")


class Request(NamedTuple):
    """One request with one new token.

    cold     nothing is cached
    hit      tail replay: another suffix after a cached prefix
    suffix   tail replay: the same, with the shortest tail, KV on the GPU
    diverge  stock: the first prompt that leaves a cached one after the prefix
    again    stock: the next ones
    aligned  stock: a prompt that leaves a cached one at the end of a chunk, where stock has a state
    """

    kind: str
    length: int  # tokens of the shared prefix
    ratio: float | None
    source: str | None  # where the KV must lie; None: as it comes
    prompt: Prompt
    timed: bool  # False: warm-up


def requests(sizes: Sizes, engine: str, chunk: int) -> list[Request]:
    """Round 0 warms up. Lengths, ratios and sources take turns, so that drift of the machine hits all alike."""
    kind = ENGINES[engine]
    rounds = sizes.primes if kind.tail_replay else sizes.cold
    make = _tail_replay_round if kind.tail_replay else _stock_round
    plan: list[Request] = []
    for number in range(rounds + 1):
        repeats = share(sizes.hits, rounds, number) if number else 1
        plan += make(sizes, kind, chunk, number, repeats)
    return plan


def _ask(sizes: Sizes, number: int, kind: str, length: int, suffix: str, **more: Any) -> Request:
    """`within`: tokens of the prefix that the prompt has, all unless given."""
    prefix = Segment(f"{length}/{number}/prefix", more.pop("within", length))
    prompt = (prefix, Segment(f"{length}/{number}/{kind}/{suffix}", sizes.suffix))
    return Request(kind, prefix.count, more.get("ratio"), more.get("source"), prompt, timed=number > 0)


def _tail_replay_round(sizes: Sizes, kind: Kind, chunk: int, number: int, repeats: int) -> Iterator[Request]:
    for length in sizes.lengths:
        yield _ask(sizes, number, "cold", length, "")
    ratios = sizes.ratios[:1] if kind.exact else sizes.ratios
    for repeat in range(repeats):
        for ratio in ratios:
            for length in sizes.lengths:
                for source in (source for source in kind.sources if source in sizes.sources):
                    suffix = f"{repeat}/{ratio}/{source}"
                    yield _ask(sizes, number, "hit", length, suffix, ratio=ratio, source=source)
                if ratio == sizes.ratios[-1]:
                    yield _ask(sizes, number, "suffix", length, f"{repeat}", ratio=SHORTEST, source=DEVICE)


def _stock_round(sizes: Sizes, kind: Kind, chunk: int, number: int, repeats: int) -> Iterator[Request]:
    for name in ("cold", "diverge"):
        for length in sizes.lengths:
            yield _ask(sizes, number, name, length, "")
    for repeat in range(repeats):
        for length in sizes.lengths:
            yield _ask(sizes, number, "again", length, f"{repeat}")
    # One per distinct chunk end.
    ends = {length // chunk * chunk: length for length in reversed(sizes.lengths) if length >= chunk}
    for end, length in ends.items():
        yield _ask(sizes, number, "aligned", length, "", within=end)


class Served(NamedTuple):
    """What an answer tells: tokens from the cache, from which tier of it, the length of the tail and how it began."""

    cached: int
    device: int
    host: int
    replayed: int | None
    start: str | None = None


def rejection(kind: str, length: int, source: str | None, least_tail: int | None, served: Served) -> str | None:
    """Why an answer is no data point: it was not served as the request means. None: it was. Without a source only cold
    requests are checked; without a least tail a hit must be exact."""
    if kind == "cold" and served.cached:
        return f"{served.cached} tokens of a fresh prompt came from the cache"
    if source is None:
        return None
    tiers = {DEVICE: served.device, HOST: served.host}
    if served.cached != length or tiers[source] != length or sum(tiers.values()) != length:
        return (
            f"not {length} tokens from the {source}: {served.device} device, {served.host} host, {served.cached} cached"
        )
    if least_tail is None:
        return None if served.start == EXACT else f"the replay is {served.start}, not {EXACT}"
    if served.replayed is None or served.replayed < least_tail:
        return f"at least {least_tail} tokens should be replayed: {served.replayed}"
    return None


def least_tail(kind: Kind, length: int, ratio: float | None) -> int | None:
    """Tokens that a hit has to replay at the least; min_tokens, and graphs of fixed lengths, may add to it. None: what
    there is between a saved state and the boundary."""
    if kind.exact:
        return None
    return tail_length(length, ratio, 1) if ratio and ratio != SHORTEST else 1


# -------------------------------------------------------------------------------------------------------- bursts


class Burst(NamedTuple):
    """Requests that are sent at once; each has the prefix and a new suffix."""

    variant: str  # prime; different: each hits a prefix of its own; same: all hit one
    prompts: tuple[Prompt, ...]
    timed: bool


def bursts(sizes: Sizes) -> list[Burst]:
    """Prefixes are sent one by one first. Round 0 warms up."""

    def prompt(index: int, suffix: str) -> Prompt:
        prefix = Segment(f"burst/prefix/{index}", sizes.burst_length)
        return (prefix, Segment(f"burst/{index}/{suffix}", sizes.suffix))

    plan = [Burst("prime", (prompt(index, "prime"),), False) for index in range(max(sizes.bursts, default=0))]
    for number in range(sizes.burst_rounds + 1):
        for count in sizes.bursts:
            for variant in ("different", "same") if count > 1 else ("different",):
                where = range(count) if variant == "different" else [0] * count
                prompts = (prompt(index, f"{variant}/{number}/{count}/{i}") for i, index in enumerate(where))
                plan.append(Burst(variant, tuple(prompts), number > 0))
    return plan


def burst_rejection(
    kind: Kind, burst: Burst, source: str | None, ratio: float | None, served: Sequence[Served]
) -> str | None:
    """As `rejection`, of the first answer that is none. Of requests with one prefix, the first brings its KV to the
    GPU for the others, so that their tier says nothing."""
    if source is None or burst.variant == "prime":
        return None
    matched = burst.prompts[0][0].count
    for one in served:
        tier = source
        if burst.variant == "same":
            tier, one = DEVICE, one._replace(device=one.device + one.host, host=0)
        if wrong := rejection("hit", matched, tier, least_tail(kind, matched, ratio), one):
            return wrong
    return None


# ---------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class BenchPlan:
    name: str
    args: dict[str, Any]
    env: dict[str, str]
    sections: tuple[str, ...]
    vocab_size: int
    sizes: Sizes = field(default_factory=Sizes)
    trace: str | None = None  # file for the filtered traces of hits, see trace_file

    @property
    def chunk(self) -> int:
        return self.args["chunked_prefill_size"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchPlan:
        sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in data["sizes"].items()}
        return cls(**{**data, "sections": tuple(data["sections"]), "sizes": Sizes(**sizes)})


def trace_file(template: str, length: int) -> Path:
    """x.trace.json.gz -> x.8226.trace.json.gz for a hit of 8,226 tokens."""
    return Path(template.removesuffix(TRACE_ENDING) + f".{length}{TRACE_ENDING}")


class Estimates(NamedTuple):
    """What the user expects a request to take; shapes and machines differ too much to guess."""

    start_seconds: float
    cold_ms: tuple[float, ...]  # per length
    hit_ms: float

    def request_ms(self, request: Request, lengths: Sequence[int]) -> float:
        """Stock's prompts that leave a cached path may cost a cold prefill."""
        if request.kind in ("hit", "suffix", "aligned"):
            return self.hit_ms
        return self.cold_ms[lengths.index(request.length)]

    def burst_ms(self, burst: Burst, tail_replay: bool) -> float:
        whole_prefill = burst.variant == "prime" or not tail_replay
        return len(burst.prompts) * (self.cold_ms[0] if whole_prefill else self.hit_ms)


def estimated_seconds(plan: BenchPlan, estimates: Estimates) -> dict[str, float]:
    """By section, and `start`."""
    asked, sent = requests(plan.sizes, plan.name, plan.chunk), bursts(plan.sizes)
    tail_replay = ENGINES[plan.name].tail_replay
    seconds = {
        "capacity": 1.0,
        "hits": sum(estimates.request_ms(request, plan.sizes.lengths) for request in asked) / 1e3,
        "bursts": sum(estimates.burst_ms(burst, tail_replay) for burst in sent) / 1e3,
        "trace": 60.0,  # most of it SGLang writing the trace
    }
    return {"start": estimates.start_seconds, **{section: seconds[section] for section in plan.sections}}


def describe(plan: BenchPlan, estimates: Estimates | None) -> list[str]:
    """What --dry-run prints."""
    lines = [f"args {plan.args}", f"env  {plan.env}"]
    if "hits" in plan.sections:
        lines += _describe_requests(requests(plan.sizes, plan.name, plan.chunk))
    if "bursts" in plan.sections:
        count = sum(len(burst.prompts) for burst in bursts(plan.sizes))
        lines.append(f"bursts: {plan.sizes.bursts} at once, {count} requests")
    if estimates:
        times = estimated_seconds(plan, estimates)
        each = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
        lines.append(f"estimated seconds: {each}; {sum(times.values()):.0f} in all")
    return [f"engine {plan.name}", *(f"  {line}" for line in lines)]


def _describe_requests(asked: Sequence[Request]) -> Iterator[str]:
    groups: dict[tuple, int] = {}
    for request in asked:
        key = (request.kind, request.length, request.ratio, request.source)
        groups[key] = groups.get(key, 0) + request.timed
    for (kind, length, ratio, source), count in groups.items():
        how = f", r={ratio}" if ratio and ratio != SHORTEST else ""
        yield f"hits: {count:3} x {kind} at {length} tokens{how}{f', KV on the {source}' if source else ''}"
    yield f"hits: {len(asked)} requests, warm-up included"
