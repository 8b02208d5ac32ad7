"""Lanes, overlaps and gaps of a made-up trace, and the filter that keeps a trace small."""

import gzip
import json

import gpu_trace
import pytest
import timeline

FORWARD, COPY, REPLAY, LOAD = 7, 13, 17, 21
ATTENTION = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>"
DELTA = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
NORM = "void flashinfer::norm::GemmaFusedAddRMSNormKernel<...>"


def on_gpu(name, stream, start, duration, cat="kernel"):
    args = {"stream": stream, "correlation": start, "bytes": 8, "grid": [1, 1, 1]}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration, "args": args}


# microseconds   0        100       200       300       400   430
# copy           rows rows                            [340, 360) out
# KV             [0, 120)                                        [360, 370) out
# replay               [50, 250)
# forward                                [260, 340)     [400, 430)
HIT = [
    on_gpu("move_rows_kernel", COPY, 0, 50),
    on_gpu("hicache_transfer_per_layer", LOAD, 0, 120),
    on_gpu(NORM, REPLAY, 50, 100),
    on_gpu("move_rows_kernel", COPY, 50, 30),
    on_gpu(DELTA, REPLAY, 150, 100),
    on_gpu(DELTA, FORWARD, 260, 40),
    on_gpu(ATTENTION, FORWARD, 300, 40),
    on_gpu("move_rows_kernel", COPY, 340, 20),
    on_gpu("hicache_transfer_all_layer", LOAD, 360, 10),
    on_gpu("Memcpy DtoH (Device -> Pinned)", FORWARD, 400, 30, "gpu_memcpy"),
]


def runtime(name, correlation, cat="cuda_runtime"):
    args = {"correlation": correlation, "cbid": 211}
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 1, "ts": 0, "dur": 5, "args": args}


def trace(events=HIT):
    others = [runtime("cudaLaunchKernel", 50), runtime("cudaStreamWaitEvent", 3)]
    others += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 1, "ts": 0, "dur": 5, "args": {}}]
    names = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": str(pid)}} for pid in (0, 9, 4)]
    return {"traceEvents": [*others, *names, *events], "schemaVersion": 1}


def summary(events=HIT):
    return timeline.summarise(timeline.events_of(trace(events)))


def test_every_event_finds_its_lane():
    placed = [(event.stream, event.lane, event.what) for event in timeline.events_of(trace())]
    assert placed == [
        (COPY, "copy", "rows in"),
        (LOAD, "copy", "KV in"),
        (REPLAY, "replay", "replay"),  # FlashInfer's norm is no attention
        (COPY, "copy", "rows in"),
        (REPLAY, "replay", "replay"),
        (FORWARD, "forward", "forward"),  # a GDN layer of the suffix
        (FORWARD, "forward", "forward"),
        (COPY, "copy", "rows out"),
        (LOAD, "copy", "KV out"),
        (FORWARD, "forward", "forward"),  # the answer's token, not a copy of the cache
    ]


def test_the_kernel_that_moves_kv_both_ways_comes_in_until_attention_has_read_it():
    events = [on_gpu("transfer_kernel_impl", LOAD, start, 5) for start in (0, 310, 360)] + HIT
    moved = [event.what for event in timeline.events_of(trace(events)) if event.name == "transfer_kernel_impl"]
    assert moved == ["KV in", "KV in", "KV out"]


def test_copies_by_the_copy_engine_have_a_stream_of_their_own():
    events = [on_gpu("Memcpy HtoD (Pinned -> Device)", 30, 10, 5, "gpu_memcpy"), *HIT]
    assert timeline.events_of(trace(events))[2].what == "memcpy in"


def test_spans_and_overlaps():
    result = summary()
    assert result["total_us"] == 430
    assert result["lanes"]["replay"] == {"start_us": 50, "end_us": 250, "span_us": 200, "busy_us": 200, "events": 2}
    assert result["lanes"]["forward"]["busy_us"] == 110 and result["lanes"]["other"] is None
    assert result["copy_busy_us"] == {"KV in": 120, "KV out": 10, "rows in": 80, "rows out": 20}
    # Copies come in during [0, 120), the replay runs during [50, 250); what is written out later hides nothing.
    assert result["overlap"] == {
        "replay_behind_copies_in": pytest.approx(70 / 200),
        "copies_in_behind_replay": pytest.approx(70 / 120, abs=1e-3),
        "copies_in_behind_compute": pytest.approx(70 / 120, abs=1e-3),
    }


def test_gaps_are_of_the_whole_gpu():
    result = summary()
    assert result["idle_us"] == 10 + 30
    assert result["idle_gaps"] == [
        {"start_us": 370, "us": 30, "after": "copy", "before": "forward"},
        {"start_us": 250, "us": 10, "after": "replay", "before": "forward"},
    ]


def test_a_short_event_inside_a_long_one_makes_no_gap():
    events = [on_gpu(ATTENTION, FORWARD, 0, 100), on_gpu(DELTA, REPLAY, 10, 5), on_gpu(ATTENTION, FORWARD, 100, 10)]
    assert summary(events)["idle_us"] == 0


def test_on_one_stream_the_replay_cannot_be_told_apart():
    events = [{**event, "args": {**event["args"], "stream": FORWARD}} for event in HIT]
    result = summary(events)
    assert result["lanes"]["replay"] is None and result["overlap"]["replay_behind_copies_in"] is None
    assert result["lanes"]["copy"]["events"] == 5 and set(result["copy_busy_us"]) == {"KV in", "KV out", "rows"}


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [([(0, 10)], [(5, 20)], 5), ([(0, 10), (5, 12)], [(0, 20)], 12), ([(0, 1)], [(1, 2)], 0), ([], [(0, 1)], 0)],
)
def test_overlap_is_of_unions(a, b, both):
    assert timeline.overlap(a, b) == timeline.overlap(b, a) == both


def test_the_filter_keeps_the_gpu_and_what_launched_it():
    kept = gpu_trace.gpu_events(trace())["traceEvents"]
    assert [event["name"] for event in kept if event.get("cat") == "cuda_runtime"] == ["cudaLaunchKernel"]
    assert sum(event.get("cat") in gpu_trace.ON_GPU for event in kept) == len(HIT)
    assert not any(event.get("cat") == "cpu_op" for event in kept)
    assert {event["pid"] for event in kept if event["ph"] == "M"} == {0, 9}
    assert all(set(event["args"]) <= {"stream", "correlation", "bytes"} for event in kept if event["ph"] == "X")
    assert timeline.events_of({"traceEvents": kept}) == timeline.events_of(trace())


def test_a_trace_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="no GPU events"):
        gpu_trace.gpu_events(trace([]))


def test_a_trace_that_is_too_large_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "hit.trace.json.gz"
    assert gpu_trace.save(trace(), path) == path.stat().st_size
    assert gpu_trace.load(path) == trace()
    monkeypatch.setattr(gpu_trace, "MAX_BYTES", 10)
    other = tmp_path / "other.json.gz"
    with pytest.raises(ValueError, match="more than 10"):
        gpu_trace.save(trace(), other)
    assert not other.exists()


@pytest.mark.parametrize("name", ["hit.trace.json.gz", "hit.json"])
def test_picture_and_summary_lie_beside_the_trace(tmp_path, name):
    text = json.dumps(trace()).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert timeline.main([str(tmp_path / name)]) == 0
    made = {f"hit.timeline.{suffix}" for suffix in ("json", "svg", "png")}
    assert {path.name for path in tmp_path.iterdir()} == {name, *made}
    assert json.loads((tmp_path / "hit.timeline.json").read_text()) == summary()
