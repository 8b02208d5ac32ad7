"""The cache model's laws, the formats of traces, and the time model against the document that it was fitted to."""

import json

import pytest
import simulate
from block_trace import Block, Request, blocks, load
from cache_model import AnyToken, Checkpoints, LruPool, Pools, checkpoints
from cache_model import simulate as serve_all
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from ttft_model import Tail, TtftModel, fit, queued

SIZE = 4  # tokens of a block in these tests


pool_sizes = st.integers(0, 60)


@given(traces(SIZE, 6), pool_sizes, pool_sizes)
def test_a_bigger_pool_never_serves_less(trace, one, other):
    small, big = sorted((one, other))
    few, many = (serve_all(trace, AnyToken(Pools(tokens))) for tokens in (small, big))
    assert all(a.hit <= b.hit for a, b in zip(few, many, strict=True))


@given(traces(SIZE, 6), pool_sizes, st.one_of(st.none(), st.integers(0, 8)), st.integers(1, 20))
def test_any_token_serves_at_least_what_checkpoints_do(trace, tokens, slots, chunk):
    any_token = serve_all(trace, AnyToken(Pools(tokens)))
    kept = serve_all(trace, Checkpoints(Pools(tokens, slots), chunk))
    assert all(a.hit >= b.hit and a.cached == b.cached for a, b in zip(any_token, kept, strict=True))


@given(traces(SIZE, 6), st.one_of(st.none(), pool_sizes), st.one_of(st.none(), st.integers(0, 8)), st.integers(1, 20))
def test_nothing_is_made_or_lost(trace, tokens, slots, chunk):
    for policy in (AnyToken(Pools(tokens)), Checkpoints(Pools(tokens, slots), chunk)):
        for served, request in zip(serve_all(trace, policy), trace, strict=True):
            assert 0 <= served.hit <= min(served.cached, served.length - 1) and served.length == request.length
        for pool in (policy.kv, getattr(policy, "states", policy.kv)):
            assert pool.inserted == pool.used + pool.evicted
            assert pool.used == sum(pool._sizes.values())
            assert pool.capacity is None or pool.used <= pool.capacity
        for state in getattr(policy, "states", LruPool(0))._sizes:
            assert state in policy.kv  # a state goes with its KV


@given(traces(SIZE, 6))
def test_without_limits_a_hit_is_the_longest_shared_prefix(trace):
    for number, served in enumerate(serve_all(trace, AnyToken(Pools(None)))):
        mine, longest = trace[number], 0
        for earlier in trace[:number]:
            shared = 0
            for a, b in zip(mine.blocks, earlier.blocks, strict=False):
                if a != b:
                    break
                shared += a.size
            longest = max(longest, shared)
        assert served.hit == min(longest, mine.length - 1)


def test_eviction_takes_what_was_used_longest_ago():
    pool = LruPool(3)
    assert [pool.touch(key) for key in "abc"] == [[], [], []]
    pool.touch("a")
    assert pool.touch("d") == ["b"] and "a" in pool
    assert pool.touch("wide", 9) == ["c", "a", "d", "wide"] and len(pool) == 0


def prompt(length: int) -> tuple[Block, ...]:
    return blocks(range(-(-length // SIZE)), length, SIZE, "own")


@pytest.mark.parametrize(
    "length, hit, chunk, kept",
    [
        (20, 0, 8, [1, 3, 4]),  # chunks end at 8 and 16, the prompt at 20
        (22, 0, 8, [1, 3, 4]),  # the end at 22 counts as 20
        (20, 4, 8, [2, 4]),  # chunks begin behind the hit: 12, and 20 is the end
        (20, 0, 10, [1, 4]),  # 10 counts as 8
        (20, 0, 100, [4]),
        (3, 0, 8, [0]),  # a prompt of one short block: it is the block
    ],
)
def test_states_lie_at_chunk_ends_and_prompt_ends(length, hit, chunk, kept):
    assert [block.key for block in checkpoints(prompt(length), hit, chunk)] == kept


def test_a_prompt_that_leaves_another_in_the_middle_is_where_the_policies_differ():
    first, second = Request(0, prompt(40), 0), Request(1, (*prompt(40)[:7], Block("x", SIZE), Block("y", SIZE)), 0)
    assert serve_all([first, second], AnyToken(Pools(None)))[1].hit == 28
    assert serve_all([first, second], Checkpoints(Pools(None, None), 16))[1].hit == 16
    assert serve_all([first, second], Checkpoints(Pools(None, None), 64))[1].hit == 0
    # the state at 16 was kept before those at 32 and 40: with two slots it is gone, its KV is not
    assert serve_all([first, second], Checkpoints(Pools(None, 2), 16))[1] == (36, 28, 0)


# ---- traces ----


def test_mooncake_lines(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}]
    lines.insert(0, {"timestamp": 900, "input_length": 512, "output_length": 1, "hash_ids": [3]})
    file.write_text("\n".join(map(json.dumps, lines)))
    early, late = load([file])
    assert (early.seconds, early.length, early.output) == (0.5, 600, 7)
    assert early.blocks == (Block((0, 3), 512), Block((0, 9), 88)) and late.blocks == early.blocks[:1]


def test_agent_conversations(tmp_path):
    requests = [{"t": 1.0, "in": 130, "out": 5, "hash_ids": [1, 2]}]
    requests.append({"t": 2.0, "requests": [{"t": 0.5, "in": 64, "out": 5, "hash_ids": [1]}]})
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"block_size": 64, "requests": requests}))
    found = load([tmp_path / "a.json", tmp_path / "b.json"])
    assert [request.seconds for request in found] == [1.0, 1.0, 2.5, 2.5]
    assert [block.size for block in found[0].blocks] == [64, 64, 2]
    served = serve_all(found, AnyToken(Pools(None)))
    assert [one.hit for one in served] == [0, 0, 63, 63]  # ids hold within a file, a sub-agent shares with its parent


GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 0, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "changed",
    [{"input_length": 2000}, {"hash_ids": [1, 2, 3]}, {"input_length": 0, "hash_ids": []}, {"timestamp": None}],
    ids=["too few blocks", "too many", "no tokens", "no time"],
)
def test_a_line_that_is_no_request_is_named(changed, tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | changed)}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl:2"):
        load([file])


# ---- times ----


def test_the_fit_goes_through_what_was_measured():
    model = fit(json.loads(simulate.RESULTS.read_text()))
    assert model.prefill(0, 16482) == pytest.approx(329, rel=0.05)
    assert model.prefill(0, 31911) == pytest.approx(673, rel=0.05)
    assert model.prefill(16384, 31911) == pytest.approx(393, rel=0.1)  # measured, and not in the fit
    assert model.replayed(16418, 16482, 821) == pytest.approx(86, rel=0.1)


def test_a_time_model_by_hand():
    model = TtftModel(fixed=1, linear=0.1, square=0.001, replay_fixed=5, replay_token=0.5)
    assert model.prefill(10, 30) == pytest.approx(1 + 2 + 0.8)
    assert model.replayed(10, 30, 4) == pytest.approx(3.8 + 5 + 2)
    assert model.replayed(0, 30, 0) == model.prefill(0, 30)
    assert Tail(0.05, 64).of(10_000) == 500 and Tail(0.05, 64, 100).of(10_000) == 100


def test_a_queue_serves_one_prefill_at_a_time():
    assert queued([0.0, 0.001, 1.0], [10.0, 20.0, 5.0]) == pytest.approx([10, 29, 5])


def test_a_document_without_measurements_is_refused():
    with pytest.raises(ValueError, match="no cold prefills"):
        fit({"engines": {}})


# ---- the command ----


def test_the_sample_in_the_repository(tmp_path, capsys):
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    assert simulate.main(["--out", str(out), "--plot", str(figure), "--shares", "0.1,1"]) == 0
    document = json.loads(out.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert document["requests"] == 400 and figure.stat().st_size > 10_000
    unlimited, kept = rows["any token, no limits"], rows["checkpoints, no limits"]
    assert 0.13 < kept["hit_rate"] < unlimited["hit_rate"] < 0.14
    assert rows["nothing cached"]["hit_tokens"] == 0
    alone, paying = rows["any token, tail replay's KV pool"], rows["the same, only hits that pay"]
    assert all(paying["prefill_ms"][p] <= alone["prefill_ms"][p] for p in ("p50", "p90", "p99"))
    assert paying["queued_ms"]["p99"] <= rows["nothing cached"]["queued_ms"]["p99"]
    assert "any token, no limits" in capsys.readouterr().out
