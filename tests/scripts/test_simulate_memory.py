"""Caches with saved states and of equal bytes: laws of the model, bytes by hand, and times against measured cells."""

import json

import equal_memory
import hit_model
import pytest
import simulate_memory
from anchor_model import Anchored, Settings, Tiered
from block_trace import Block, Request
from cache_model import AnyToken, Pools
from equal_memory import Bytes, Held
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from ttft_model import Tail

SIZE = 128


@given(
    traces(SIZE, 8),
    st.integers(0, 2000),
    st.integers(0, 6),
    st.sampled_from([0, 64, 128, 300]),
    st.sampled_from([128, 500]),
)
def test_states_change_how_a_hit_begins_and_never_what_it_is(trace, tokens, places, interval, chunk):
    policy = Anchored(tokens, places, Settings(interval, Tail(0.05, 16), chunk))
    cache, plain = Tiered(policy, tokens // 2), AnyToken(Pools(tokens))
    for number, request in enumerate(trace):
        hit = cache.serve(request, number)
        assert hit.served == plain.serve(request, number)
        assert bool(hit.start) == (hit.served.hit > 0) and hit.loaded <= hit.served.hit
        assert hit.replayed <= max(2 * interval, hit.served.hit + SIZE) and (places or not hit.anchored)
        held = {anchor: (block, offset) for block, found in policy._of.items() for offset, anchor in found.items()}
        assert held == policy._where and set(policy._order) == held.keys()
        assert all(block in policy.kv and 0 < offset <= block.size for block, offset in held.values())
        assert len(held) + len(policy._free) == places


def prompt(*keys: str) -> tuple[Block, ...]:
    return tuple(Block("".join(keys[: i + 1]), SIZE) for i in range(len(keys)))


def test_a_hit_begins_at_the_last_state_before_it():
    policy = Anchored(10_000, 9, Settings(256, Tail(0.05, 16), 10_000))
    cache = Tiered(policy, 10_000)
    assert cache.serve(Request(0, prompt(*"abcdefgh"), 0), 0)[2:] == (0, "", False)
    # a pass in a graph: nothing is saved inside, one state at its end
    hit = cache.serve(Request(1, prompt(*"abcdefgh", "x"), 0), 1)
    assert (hit.start, hit.anchored, hit.served.hit) == ("exact", True, 1024) and hit.replayed < SIZE
    hit = cache.serve(Request(2, prompt(*"abcdef", "y"), 0), 2)
    assert (hit.start, hit.anchored) == ("zero", False) and hit.replayed < 64
    hit = cache.serve(Request(3, prompt(*"ab", "z"), 0), 3)
    assert (hit.start, hit.anchored) == ("exact", False) and 256 <= hit.replayed < 384, "all of it is within reach"


def test_long_passes_leave_states_inside_of_them():
    policy = Anchored(10_000, 99, Settings(256, Tail(), 10_000))
    policy.serve(Request(0, prompt(*"abcdefghijklmnopqrstuvwxyz"), 0), 0)
    assert policy.saved == 26 * SIZE // 256


def test_a_full_store_keeps_the_state_that_prompts_begin_at():
    def exact(by_worth: bool) -> int:
        cache = Tiered(Anchored(10**6, 4, Settings(512, Tail(0.05, 16), 10**6, by_worth)), 10**6)
        shared, found = prompt(*"abcdefghijkl"), 0
        cache.serve(Request(0, shared, 0), 99)
        for number in range(12):
            keys = [f"{number}.{i}" for i in range(8)]
            for other in range(3):  # with the one before it, as many other prompts as the store has places
                cache.serve(Request(0, prompt(f"other {number}.{other}", *keys), 0), number)
            found += cache.serve(Request(0, (*shared, Block(("own", number), SIZE)), 0), number).start == "exact"
        return found

    assert exact(True) == 12 and exact(False) == 1  # before the store is full


def test_equal_bytes_by_hand():
    size, exclusive = Bytes(kv=10, rows=20, state=100, anchor=50), True
    assert equal_memory.stock(1000, 7, 10_000, 0.7, size, exclusive) == Held(1000, 1700, 37)
    assert equal_memory.stock(1000, 7, 10_000, 0.7, size) == Held(1000, 1000, 30)  # 700 are on the GPU as well
    tail_replay = equal_memory.tail_replay
    assert tail_replay(1000, 35_000, 0, 0, size, exclusive) == Held(1000, 1500, 0)  # 15,000 left, 30 a token
    assert tail_replay(1000, 35_000, 0, 0, size) == Held(1000, 1166, 0)  # 1,000 of these are copies
    assert tail_replay(1000, 35_000, 64, 3_000, size, exclusive) == Held(1000, 1460, 24)  # one per 64 of 1,500
    assert tail_replay(1000, 35_000, 10, 3_000, size, exclusive).states == 60  # all that they may take
    for way in (True, False):
        assert tail_replay(1000, 25_000, 0, 0, size, way).tokens == (1166 if way else 1000)
        assert tail_replay(1000, 8_000, 0, 0, size, way) == Held(400, 400, 0)  # no rows, no hit


@given(st.integers(1, 10**5), st.integers(0, 10**7), st.integers(0, 500), st.integers(0, 10**6), st.booleans())
def test_nobody_holds_more_than_there_is(device, host, interval, anchor_bytes, exclusive):
    size = Bytes(kv=10, rows=20, state=100, anchor=50)
    held = equal_memory.tail_replay(device, host, interval, min(anchor_bytes, host), size, exclusive)
    on_host = held.tokens - (device if exclusive else 0) if held.tokens > device else 0
    assert held.tokens * size.rows + on_host * size.kv + held.states * size.anchor <= host
    assert 0 <= held.device_tokens <= min(device, held.tokens)


def measured(shape: str) -> tuple[hit_model.HitModel, dict]:
    results = simulate_memory.RESULTS
    bench = json.loads((results / f"h200-{shape}-ttft.json").read_text())
    check = json.loads((results / f"h200-{shape}.json").read_text())
    return hit_model.fit(check, bench, 32_768, 51_511_296), bench


def test_times_are_near_what_was_measured_and_was_not_in_the_fit():
    model, bench = measured("qwen3.6-27b")
    earlier = json.loads((simulate_memory.RESULTS / "h200-qwen3.6-27b.json").read_text())
    rows = earlier["engines"]["tail_replay"]["sections"]["ttft"]["result"]
    found = [row for row in rows if row["kind"] == "again"]
    assert len(found) == 6
    for row in found:
        predicted = model.ours(row["matched"], row["prompt_tokens"], row["replayed"][0])
        assert predicted == pytest.approx(row["ms"]["p50"], rel=0.05)
    for row in hit_model.hits(bench, "device", "anchored"):
        predicted = model.ours(row["length"], row["length"] + 64, row["replayed"][0], anchored=True)
        assert predicted == pytest.approx(row["ms"]["p50"], rel=0.15)


def test_a_load_hides_behind_a_replay_and_a_longer_one_does_not():
    model, _ = measured("qwen3.5-4b")
    alone = model.ours(1000, 1064, 500)
    assert model.ours(1000, 1064, 500, loaded=1000) == alone < model.ours(1000, 1064, 500, loaded=100_000)
    assert model.ours(1000, 1064, 500, anchored=True) == pytest.approx(alone + model.state)


def test_documents_without_such_hits_are_refused():
    _, bench = measured("qwen3.5-4b")
    check = json.loads((simulate_memory.RESULTS / "h200-qwen3.5-4b.json").read_text())
    bench["engines"]["stock"]["sections"]["hits"]["result"] = []
    assert hit_model.fit(check, bench, 1, 1).short_stock > 0, "the other document has some"
    rows = check["engines"]["stock"]["sections"]["ttft"]["result"]
    rows[:] = [row for row in rows if row["kind"] == "cold"]
    with pytest.raises(ValueError, match="none of stock's"):
        hit_model.fit(check, bench, 1, 1)


def test_the_command_on_the_sample(tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--scale", "0.02", "--intervals", "1024,8192", "--anchor-dtypes", "bf16", "--limit", "200"]
    assert simulate_memory.main([*options, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    nothing, tier, own, packed, *saved = document["rows"]
    assert tier["hit_tokens"] >= nothing["hit_tokens"] and own["tokens"] < packed["tokens"]
    assert [row["interval"] for row in saved] == [1024, 8192, 8192]
    assert all(0 <= row["exact_hit_tokens"] <= row["hit_tokens"] for row in document["rows"])
    assert all(row["tokens"] < packed["tokens"] for row in saved), "states take their part of the host"
    assert "saved states, N = 8,192" in capsys.readouterr().out
