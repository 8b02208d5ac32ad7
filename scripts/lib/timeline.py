"""A picture of one hit: what its copies, its replay and the forward pass of its suffix did at which time.

    scripts/timeline TRACE.json[.gz]...

Writes TRACE.timeline.png, .svg and .json (spans, overlaps, idle gaps) beside each. A trace comes from
scripts/bench_ttft --trace ENGINE, or from SGLang's profiler. How an event finds its lane:

    copy      by name, on whatever stream: move_rows_kernel (rows), HiCache's transfer kernels (KV); and copies between
              host and GPU on a stream that runs nothing else
    forward   all else on the streams that run attention kernels
    replay    all else on the streams that run Gated DeltaNet kernels or matrix products but no attention
    other     the rest

Where replay and forward share one stream (overlap off), nothing tells them apart: all is drawn as forward, and the
summary says `"replay": null`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_trace

from sglang_tailreplay.figure import save_figure

LANES = ("copy", "replay", "forward", "other")
ROWS = re.compile(r"move_rows_kernel")
KV = re.compile(r"transfer_kernel_impl")  # sgl_kernel's, in either direction
KV_IN = re.compile(r"hicache_transfer_per_layer")  # SGLang loads layer by layer, and writes all layers at once
KV_OUT = re.compile(r"hicache_transfer_all_layer")
MEMCPY = re.compile(r"Memcpy (HtoD|DtoH)")
# FlashInfer's, FlashAttention's, Triton's (its decode kernels have the second form).
ATTENTION = re.compile(r"PrefillWith|DecodeWith|FlashAttn|flash_fwd|fmha|^_fwd_kernel|^_fwd_grouped_kernel")
LAYERS = re.compile(r"gated_delta|causal_conv1d|chunk_fwd|recompute_w_u|gdn|gemm|nvjet|cutlass", re.IGNORECASE)

GAP_US = 5.0  # shorter pauses between two kernels are launches
SHOWN_GAPS = 5

Interval = tuple[float, float]  # start, end in microseconds


class Event(NamedTuple):
    name: str
    stream: Any
    start: float  # microseconds
    end: float
    lane: str
    what: str  # of a copy: rows, KV or memcpy, with in (to the GPU) or out where that is known; else the lane


# ---------------------------------------------------------------------------------------------------------- lanes


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """The events on the GPU with their lanes, by start. ValueError where nothing ran on a GPU."""
    raw = [event for event in gpu_trace.gpu_events(trace)["traceEvents"] if event.get("cat") in gpu_trace.ON_GPU]
    lane_of = stream_lanes(raw)
    placed = [_place(event, lane_of) for event in sorted(raw, key=lambda event: event["ts"])]
    replayed = max((event.end for event in placed if event.lane == "replay"), default=None)
    attended = max((event.end for event in placed if ATTENTION.search(event.name)), default=None)
    # One kernel moves both ways. Rows come in until the replay ends, KV until the last attention has read it; what
    # starts later is written out.
    until = {"rows": replayed, "KV": attended}
    return [_directed(event, until.get(event.what)) for event in placed]


def stream_lanes(raw: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Lane of what a stream runs beside copies that are known by their name."""
    names: dict[Any, list[str]] = {}
    for event in raw:
        names.setdefault(_stream(event), []).append(event["name"])
    return {stream: _stream_lane(of_stream) for stream, of_stream in names.items()}


def _stream_lane(names: Sequence[str]) -> str:
    if any(map(ATTENTION.search, names)):
        return "forward"
    if any(map(LAYERS.search, names)):
        return "replay"
    only_copies = all(_copied(name) or MEMCPY.search(name) or "Memset" in name for name in names)
    return "copy" if only_copies else "other"


def _stream(event: Mapping[str, Any]) -> Any:
    return event["args"].get("stream", event.get("tid"))


def _copied(name: str) -> str | None:
    for pattern, what in ((ROWS, "rows"), (KV, "KV"), (KV_IN, "KV in"), (KV_OUT, "KV out")):
        if pattern.search(name):
            return what
    return None


def _place(event: Mapping[str, Any], lane_of: Mapping[Any, str]) -> Event:
    stream, start = _stream(event), float(event["ts"])
    named = _copied(event["name"])
    lane = "copy" if named else lane_of[stream]
    what = named or (_memcpy(event["name"]) if lane == "copy" else lane)
    return Event(event["name"], stream, start, start + float(event.get("dur", 0)), lane, what)


def _memcpy(name: str) -> str:
    return "memcpy in" if "HtoD" in name else "memcpy out" if "DtoH" in name else "memcpy"


def _directed(event: Event, until: float | None) -> Event:
    if until is None:
        return event
    return event._replace(what=f"{event.what} {'in' if event.start < until else 'out'}")


# ------------------------------------------------------------------------------------------------------ intervals


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as disjoint intervals by start."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in merge(intervals))


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Time that lies in both unions."""
    a, b = merge(a), merge(b)
    return length(a) + length(b) - length([*a, *b])


# -------------------------------------------------------------------------------------------------------- summary


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """Times in microseconds, starts from the first event on the GPU. Fractions are of busy time, not of spans."""
    zero, last = min(event.start for event in events), max(event.end for event in events)
    spans = {lane: [(e.start, e.end) for e in events if e.lane == lane] for lane in LANES}
    arriving = [(e.start, e.end) for e in events if e.lane == "copy" and not e.what.endswith("out")]
    copied: dict[str, float] = {}
    for what in sorted({event.what for event in events if event.lane == "copy"}):
        copied[what] = round(length((e.start, e.end) for e in events if e.what == what), 1)
    gaps = _gaps(events)
    return {
        "total_us": round(last - zero, 1),
        "lanes": {lane: _lane(spans[lane], zero) for lane in LANES},
        "copy_busy_us": copied,
        "overlap": {
            "replay_behind_copies_in": _share(overlap(spans["replay"], arriving), length(spans["replay"])),
            "copies_in_behind_replay": _share(overlap(arriving, spans["replay"]), length(arriving)),
            "copies_in_behind_compute": _share(
                overlap(arriving, [*spans["replay"], *spans["forward"]]), length(arriving)
            ),
        },
        "idle_us": round(sum(gap["us"] for gap in gaps), 1),
        "idle_gaps": sorted(gaps, key=lambda gap: -gap["us"])[:SHOWN_GAPS],
    }


def _lane(spans: Sequence[Interval], zero: float) -> dict[str, float] | None:
    if not spans:
        return None
    start, end = min(spans)[0], max(end for _, end in spans)
    return {
        "start_us": round(start - zero, 1),
        "end_us": round(end - zero, 1),
        "span_us": round(end - start, 1),
        "busy_us": round(length(spans), 1),
        "events": len(spans),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def _gaps(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Pauses of the whole GPU, with the lanes before and after."""
    zero, gaps, last = events[0].start, [], events[0]
    for event in events[1:]:
        if event.start - last.end > GAP_US:
            start, pause = round(last.end - zero, 1), round(event.start - last.end, 1)
            gaps.append({"start_us": start, "us": pause, "after": last.lane, "before": event.lane})
        if event.end > last.end:
            last = event
    return gaps


# -------------------------------------------------------------------------------------------------------- picture

COLOURS = {"rows": "C0", "rows in": "C0", "rows out": "C9", "KV": "C1", "KV in": "C1", "KV out": "C8"}
COLOURS |= {"memcpy": "C4", "memcpy in": "C4", "memcpy out": "C6", "replay": "C2", "forward": "C3", "other": "C7"}


def draw(events: Sequence[Event], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    zero = min(event.start for event in events)
    there = {_drawn_in(event) for event in events}
    lanes = [lane for lane in ("copy rows", "copy KV", "copy memcpy", *LANES[1:]) if lane in there]
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.7 * len(lanes)))
    for what in dict.fromkeys(event.what for event in events):
        mine = [event for event in events if event.what == what]
        row = len(lanes) - 1 - lanes.index(_drawn_in(mine[0]))
        bars = [((e.start - zero) / 1e3, (e.end - e.start) / 1e3) for e in mine]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=COLOURS[what], label=what, linewidth=0)
    axes.set_yticks(range(len(lanes)), reversed(lanes))
    axes.set(xlabel="ms since the first event on the GPU", title=title)
    axes.grid(True, axis="x", alpha=0.25)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, out.with_name(out.name + ".svg"))  # the name has dots of its own


def _drawn_in(event: Event) -> str:
    """Rows and KV move at the same time: one lane would hide one behind the other."""
    return f"copy {event.what.split()[0]}" if event.lane == "copy" else event.lane


def main(paths: Sequence[str]) -> int:
    if not paths or paths[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if paths else 2
    for path in map(Path, paths):
        events = events_of(gpu_trace.load(path))
        name = re.sub(r"(\.trace)?\.json(\.gz)?$", "", path.name)
        out = path.with_name(f"{name}.timeline")
        draw(events, name, out)
        summary = json.dumps(summarise(events), indent=1)
        out.with_name(out.name + ".json").write_text(summary + "\n")
        print(f"{summary}\n{out}.json, .svg and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
