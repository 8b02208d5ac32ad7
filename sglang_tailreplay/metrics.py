"""Prometheus metrics on SGLang's /metrics endpoint, and the times of replays without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from sglang_tailreplay.radix.boundary import GENERATION, RESIDUAL, ROWS_MISSING
from sglang_tailreplay.replay_rule import EXACT, KINDS
from sglang_tailreplay.scheduling import Admission
from sglang_tailreplay.verification import Agreement

REQUESTS = ("cold", "replayed", "anchored", "seeded", "zero")  # see _kind
SHRUNK = ({"reason": ROWS_MISSING}, {"reason": GENERATION}, {"reason": RESIDUAL})
RESIDUAL_BUCKETS = (0, 1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1)
KL_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counts what happens to requests. Made in the scheduler process, after SGLang has set PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self, model_name: str):
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = {"model_name": model_name}

        def make(kind: Callable, name: str, text: str, *labels: str, **options: Any):
            return kind(f"sglang:tail_replay_{name}", text, ["model_name", *labels], **options)

        self._requests = make(Counter, "requests", "Requests that got their first prefill, by kind.", "kind")
        starts = "Hits, by what their states were rebuilt from: exact (all of it), seeded (an older state), zero."
        self._hits = make(Counter, "hits", starts, "start")
        self._matched = make(Counter, "matched_tokens", "Prompt tokens served from the cache.")
        self._replayed = make(Counter, "replayed_tokens", "Tokens replayed to rebuild recurrent states.")
        self._shrunk = make(Counter, "shrunk_hits", "Hits whose boundary was made smaller, by reason.", "reason")
        residual = "Largest share of any head's missing state that a hit's replay left out, with a bound set."
        self._residual = make(Histogram, "residual", residual, buckets=RESIDUAL_BUCKETS)
        self._lost = make(Counter, "shrunk_tokens", "Cached tokens that such hits could not use.")
        stages = "Time of a replay: fetch (rows of one group), replay (a batch), wait (what the prefill waited for it)."
        self._seconds = make(Histogram, "seconds", stages, "stage", buckets=SECONDS_BUCKETS)
        self._verified = make(Counter, "verified_hits", "Hits that were computed again from nothing.")
        self._agreeing = make(Counter, "agreeing_hits", "Of these, those with the same most likely first token.")
        self._unverified = make(Counter, "unverified_hits", "Hits that were to be verified and could not be.")
        divergence = "Nats from the cold distribution of the first token to that of a verified hit."
        self._kl = make(Histogram, "verified_kl", divergence, buckets=KL_BUCKETS)
        self._used = make(Gauge, "rows_used", "Rows in use.", multiprocess_mode="mostrecent")
        self._capacity = make(Gauge, "rows_capacity", "Rows in the store.", multiprocess_mode="mostrecent")
        self._anchors = make(Gauge, "anchors_used", "States saved on the host.", multiprocess_mode="mostrecent")
        places = "Places for such states."
        self._anchor_places = make(Gauge, "anchors_capacity", places, multiprocess_mode="mostrecent")
        self._evicted = make(Counter, "anchors_evicted", "Saved states given up for others.")
        self._evicted_so_far = 0
        # Known from the start, so that what has not happened reads 0.
        shrunk = [(self._shrunk, labels) for labels in SHRUNK]
        plain = (self._matched, self._replayed, self._lost, self._verified, self._agreeing, self._unverified, self._kl)
        plain += (self._evicted, self._residual)
        for metric, labels in (*((metric, {}) for metric in plain), *shrunk):
            metric.labels(**self._labels, **labels)
        for kind in KINDS:
            self._hits.labels(**self._labels, start=kind)
        for kind in REQUESTS:
            self._requests.labels(**self._labels, kind=kind)

    def admitted(self, admission: Admission) -> None:
        self._requests.labels(**self._labels, kind=_kind(admission)).inc()
        if admission.matched:
            self._hits.labels(**self._labels, start=admission.start).inc()
        if admission.residual is not None:
            self._residual.labels(**self._labels).observe(admission.residual)
        self._matched.labels(**self._labels).inc(admission.matched)
        self._replayed.labels(**self._labels).inc(admission.replayed)
        if admission.shrunk_from is not None:
            self._shrunk.labels(**self._labels, reason=admission.shrunk_by).inc()
            self._lost.labels(**self._labels).inc(admission.shrunk_from - admission.matched)

    def verified(self, agreement: Agreement) -> None:
        self._verified.labels(**self._labels).inc()
        self._agreeing.labels(**self._labels).inc(agreement.first_token)
        self._kl.labels(**self._labels).observe(agreement.kl)

    def unverified(self, hits: int) -> None:
        self._unverified.labels(**self._labels).inc(hits)

    def rows(self, used: int, capacity: int) -> None:
        self._used.labels(**self._labels).set(used)
        self._capacity.labels(**self._labels).set(capacity)

    def anchors(self, used: int, capacity: int, evicted: int) -> None:
        """`evicted`: since the start."""
        self._anchors.labels(**self._labels).set(used)
        self._anchor_places.labels(**self._labels).set(capacity)
        self._evicted.labels(**self._labels).inc(evicted - self._evicted_so_far)
        self._evicted_so_far = evicted

    def seconds(self, stage: str, seconds: float) -> None:
        self._seconds.labels(**self._labels, stage=stage).observe(seconds)


def _kind(admission: Admission) -> str:
    if admission.anchored:
        return "anchored" if admission.start == EXACT else "seeded"
    return "replayed" if admission.replayed else "zero" if admission.matched else "cold"


class Stopwatch:
    """Times stretches of a stream; reports them once the device has passed their end, never waiting for it."""

    def __init__(self, report: Callable[[str, float], None] | None, cuda: bool):
        """Without `report` nothing is measured: events cost the host time on every hit."""
        self._report = report
        self._cuda = cuda
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, stage: str):
        """Time what the body puts on the current stream (on a CPU: the body)."""
        if self._report is None:
            yield
            return
        if not self._cuda:
            begin = time.perf_counter()
            yield
            self._report(stage, time.perf_counter() - begin)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._open.append((stage, begin, end))

    def harvest(self) -> None:
        """Report the stretches that are over."""
        while self._open and self._open[0][2].query():
            stage, begin, end = self._open.popleft()
            self._report(stage, begin.elapsed_time(end) / 1000)
