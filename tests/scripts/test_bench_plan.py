"""What bench_ttft asks, and which answers count; no engine runs here."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import bench_plan
import bench_ttft
import paper
import pytest
from bench_plan import BenchPlan, Burst, Served, Sizes, burst_rejection, rejection
from prompts import prompt_len, tokens

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = Sizes(lengths=(300, 600), hits=5, cold=3, primes=2, bursts=(1, 3), burst_length=100, burst_rounds=2)
CHUNK = 256
TAIL_REPLAY = [name for name, kind in bench_plan.ENGINES.items() if kind.tail_replay]


def shared_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("engine", bench_plan.ENGINES)
def test_every_prompt_shares_exactly_its_prefix_with_an_earlier_one(engine):
    seen = []
    for request in bench_plan.requests(SMALL, engine, CHUNK):
        ids = tokens(request.prompt, 200_000)
        longest = max((shared_prefix(ids, other) for other in seen), default=0)
        assert longest == (0 if request.kind == "cold" else request.length), request
        assert len(ids) == request.length + SMALL.suffix
        seen.append(ids)


@pytest.mark.parametrize("engine", TAIL_REPLAY)
def test_every_cell_of_an_engine_gets_its_samples(engine):
    timed = [request for request in bench_plan.requests(SMALL, engine, CHUNK) if request.timed]
    for length in SMALL.lengths:
        assert sum(r.kind == "cold" and r.length == length for r in timed) == SMALL.primes
        kind = bench_plan.ENGINES[engine]
        for ratio in SMALL.ratios[:1] if kind.exact else SMALL.ratios:
            for source in kind.sources:
                cell = [r for r in timed if (r.kind, r.length, r.ratio, r.source) == ("hit", length, ratio, source)]
                assert len(cell) == SMALL.hits


def test_stock_gets_one_divergence_per_cold_prompt_and_one_prompt_per_chunk_end():
    timed = [r for r in bench_plan.requests(SMALL, "stock", CHUNK) if r.timed]
    counts = {}
    for request in timed:
        counts[request.kind, request.length] = counts.get((request.kind, request.length), 0) + 1
    expected = {(kind, length): SMALL.cold for kind in ("cold", "diverge") for length in SMALL.lengths}
    expected |= {("again", length): SMALL.hits for length in SMALL.lengths}
    assert counts == expected | {("aligned", 256): SMALL.cold, ("aligned", 512): SMALL.cold}


def test_cells_take_turns():
    """Between two samples of a cell lies one of every other cell."""
    requests = [r for r in bench_plan.requests(SMALL, "host", CHUNK) if r.kind == "hit" and r.timed]
    cells = [(r.length, r.ratio, r.source) for r in requests]
    distinct = len(set(cells))
    assert distinct == 8
    assert all(len(set(cells[i : i + distinct])) == distinct for i in range(0, len(cells), distinct))


def test_a_hit_on_the_gpu_follows_one_that_brought_the_same_kv():
    requests = [r for r in bench_plan.requests(SMALL, "host", CHUNK) if r.kind != "cold"]
    for before, request in zip(requests, requests[1:], strict=False):
        if request.source == "device":
            assert before.prompt[0] == request.prompt[0]


def test_warm_up_is_one_of_each():
    warm = [r for r in bench_plan.requests(SMALL, "host", CHUNK) if not r.timed]
    assert len(warm) == len({(r.kind, r.length, r.ratio, r.source) for r in warm}) == 2 + 8 + 2


@pytest.mark.parametrize(
    ("source", "served", "wrong"),
    [
        ("host", Served(300, 0, 300, 15), False),
        ("host", Served(300, 0, 300, 64), False),  # min_tokens
        ("host", Served(300, 300, 0, 15), True),
        ("host", Served(300, 1, 299, 15), True),
        ("host", Served(299, 0, 299, 15), True),
        ("device", Served(300, 300, 0, 15), False),
        ("device", Served(300, 0, 300, 15), True),
        ("device", Served(0, 0, 0, None), True),
        ("device", Served(300, 300, 0, 14), True),
        ("device", Served(300, 300, 0, None), True),
    ],
)
def test_a_hit_counts_only_from_its_tier_and_with_its_tail(source, served, wrong):
    least = bench_plan.least_tail(bench_plan.ENGINES["host"], 300, 0.05)
    assert (rejection("hit", 300, source, least, served) is not None) == wrong


@pytest.mark.parametrize("start", ["exact", "seeded", "zero", None])
def test_a_hit_on_saved_states_counts_only_if_it_is_exact(start):
    least = bench_plan.least_tail(bench_plan.ENGINES["anchored"], 300, 0.05)
    assert (rejection("hit", 300, "host", least, Served(300, 0, 300, 3, start)) is None) == (start == "exact")


def test_hits_can_be_asked_from_one_tier_only():
    for sources in (("host",), ("device",)):
        asked = bench_plan.requests(dataclasses.replace(SMALL, sources=sources), "host", CHUNK)
        assert {request.source for request in asked if request.kind == "hit"} == set(sources)


def test_a_cold_prompt_counts_only_if_nothing_was_cached():
    assert rejection("cold", 300, None, 1, Served(0, 0, 0, None)) is None
    assert rejection("cold", 300, None, 1, Served(1, 1, 0, None))
    assert rejection("diverge", 300, None, 1, Served(256, 256, 0, None)) is None  # stock: as it comes


def test_tail_length_is_read_as_written():
    kind = bench_plan.ENGINES["host"]
    assert bench_plan.least_tail(kind, 1000, 0.05) == 50
    assert bench_plan.least_tail(kind, 8226, 0.1) == 823
    assert bench_plan.least_tail(kind, 8226, bench_plan.SHORTEST) == 1


def test_bursts_hit_prefixes_of_their_own_or_one():
    plan = bench_plan.bursts(SMALL)
    primed = {burst.prompts[0][0] for burst in plan if burst.variant == "prime"}
    sent = [burst for burst in plan if burst.variant != "prime"]
    for burst in sent:
        prefixes = {prompt[0] for prompt in burst.prompts}
        assert prefixes <= primed
        assert len(prefixes) == (1 if burst.variant == "same" else len(burst.prompts))
    suffixes = [prompt[1] for burst in sent for prompt in burst.prompts]
    assert len(set(suffixes)) == len(suffixes)
    timed = [(burst.variant, len(burst.prompts)) for burst in sent if burst.timed]
    assert timed == [("different", 1), ("different", 3), ("same", 3)] * SMALL.burst_rounds


def test_a_burst_counts_if_all_its_answers_do():
    prompt = bench_plan.bursts(SMALL)[0].prompts[0]
    good, from_gpu, miss = Served(100, 0, 100, 5), Served(100, 100, 0, 5), Served(0, 0, 0, None)

    def judged(variant, *served):
        burst = Burst(variant, (prompt,) * len(served), True)
        return burst_rejection(bench_plan.ENGINES["host"], burst, "host", 0.05, served)

    assert judged("different", good, good) is None
    assert judged("different", good, from_gpu)
    assert judged("same", good, from_gpu) is None
    assert judged("same", good, miss)
    stock = bench_plan.ENGINES["stock"]
    assert burst_rejection(stock, Burst("different", (prompt,), True), None, None, [miss]) is None


@pytest.mark.parametrize(
    "wrong", [{"cold": 0}, {"primes": 0}, {"primes": 3, "hits": 2}, {"ratios": (0.0,)}, {"sources": ("disk",)}]
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError):
        Sizes(**wrong)


def test_plan_survives_json():
    plan = BenchPlan("host", {"chunked_prefill_size": 256}, {}, ("hits", "trace"), 1024, SMALL, "x.json.gz")
    assert BenchPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_paper_lengths_go_with_the_shape():
    assert paper.lengths("olmo-hybrid-7b") == (8225, 16417, 31366)
    assert paper.lengths(None) == paper.lengths("qwen3.5-4b") == (8226, 16418, 31847)


@pytest.mark.parametrize(
    ("shape", "length", "ratio", "published"),
    # The factors that Table 2 prints beside its cells
    [
        ("olmo-hybrid-7b", 8225, 0.05, 3.19),
        ("olmo-hybrid-7b", 31366, 0.1, 9.50),
        ("qwen3.5-4b", 8226, 0.05, 2.55),
        ("qwen3.5-4b", 31847, 0.1, 7.27),
        ("qwen3.6-27b", 16418, 0.05, 11.12),
        ("qwen3.6-27b", 31847, 0.05, 14.32),
    ],
)
def test_paper_speedups_are_those_it_prints(shape, length, ratio, published):
    assert paper.speedup(shape, length, ratio, paper.SKIP) == pytest.approx(published, abs=0.01)


def test_cells_that_the_paper_lacks_have_no_speedup():
    assert paper.speedup("qwen3.5-4b", 8226, 0.05, paper.OVERLAP) is None
    assert paper.speedup("qwen3.5-4b", 8226, 0.2, paper.SKIP) is None
    assert paper.speedup("/some/model", 8226, 0.05, paper.SKIP) is None


# ------------------------------------------------------------------------------------------------------ arguments


def plans(*arguments):
    return {plan.name: plan for plan in bench_ttft.plans(bench_ttft.parse(["--model-shape", "qwen3.5-4b", *arguments]))}


def test_engines_differ_by_their_ablation_and_tier():
    chosen = plans("--engines", "stock,resident,host,host-ovl,host-ser", "--config", "host_gb=3")
    assert "radix_cache_backend" not in chosen["stock"].args and "SGLANG_TAILREPLAY" not in chosen["stock"].env
    assert "tailreplay" not in chosen["stock"].env["SGLANG_PLUGINS"].split(",")
    (olmo,) = bench_ttft.plans(bench_ttft.parse(["--model-shape", "olmo-hybrid-7b", "--engines", "stock"]))
    assert "tailreplay" in olmo.env["SGLANG_PLUGINS"].split(","), "stock SGLang does not know this model"
    assert "radix_cache_backend" not in olmo.args
    config = {name: json.loads(plan.env["SGLANG_TAILREPLAY"]) for name, plan in chosen.items() if name != "stock"}
    assert {name: (c["overlap"], c["skip"]) for name, c in config.items()} == {
        "resident": (True, True),
        "host": (True, True),
        "host-ovl": (True, False),
        "host-ser": (False, False),
    }
    assert all(c["host_gb"] == 3 for c in config.values())
    for name, plan in chosen.items():
        host = name.startswith("host")
        assert plan.args.get("enable_hierarchical_cache", False) == host
        assert ("device_eviction" in plan.env["SGLANG_PLUGINS"].split(",")) == host


def test_only_traced_engines_have_the_section():
    chosen = plans("--engines", "stock,host", "--trace", "host", "--only", "hits")
    assert (chosen["stock"].sections, chosen["host"].sections) == (("hits",), ("hits", "trace"))
    assert chosen["stock"].trace is None and chosen["host"].trace.endswith("bench_ttft.host.trace.json.gz")


@pytest.mark.parametrize(
    "wrong",
    [("--tflops", "700"), ("--engines", "stock", "--trace", "host"), ("--cold-ms", "1,2"), ("--engines", "gpu")]
    + [("--engines", "none"), ("--engines", "none,host", "--add", "x.json")],
)
def test_arguments_that_do_not_fit_are_refused(wrong):
    with pytest.raises(SystemExit):
        plans(*wrong)


def test_dry_run_adds_estimates_up():
    command = [sys.executable, SCRIPTS / "bench_ttft", "--model-shape", "qwen3.5-4b", "--engines", "resident"]
    command += ["--dry-run", "--only", "hits", "--start-seconds", "100", "--cold-ms", "100,200,300", "--hit-ms", "10"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "hits:  20 x hit at 8226 tokens, r=0.05, KV on the device" in text
    # 6 rounds of three cold prompts, 21 of three lengths with two ratios and a suffix
    hits = 6 * 0.6 + 21 * 9 * 0.01
    assert f"start 100, hits {hits:.0f}; {100 + hits:.0f} in all" in text


def test_lengths_of_prompts_do_not_exceed_the_small_pools():
    at_once = max(Sizes().bursts) * (Sizes().burst_length + Sizes().suffix + Sizes().burst_new_tokens)
    of_a_round = sum(length for shape in paper.TABLE_2.values() for length in shape) // len(paper.TABLE_2)
    assert max(at_once, of_a_round) < bench_plan.TAIL_REPLAY_ARGS["max_total_tokens"]
    assert prompt_len(bench_plan.bursts(Sizes())[0].prompts[0]) == Sizes().burst_length + Sizes().suffix
