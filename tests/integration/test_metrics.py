"""Names and labels of the metrics are an interface: dashboards and the tests of serving read them."""

from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
import torch

from sglang_tailreplay.metrics import REQUESTS, SECONDS_BUCKETS, Metrics, Stopwatch
from sglang_tailreplay.radix.boundary import GENERATION, RESIDUAL, ROWS_MISSING
from sglang_tailreplay.scheduling import Admission
from sglang_tailreplay.verification import Agreement

MODEL = {"model_name": "m"}


@pytest.fixture
def registry(monkeypatch):
    fresh = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=fresh))
    return fresh


def samples(registry) -> dict[tuple, float]:
    """(name, labels) -> value, without the times at which a counter was made."""
    found = [sample for family in registry.collect() for sample in family.samples]
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for sample in found
        if not sample.name.endswith("_created")
    }


def key(name: str, **labels: str) -> tuple:
    return (f"sglang:tail_replay_{name}", *sorted({**MODEL, **labels}.items()))


def test_names_types_and_labels(registry):
    metrics = Metrics("m")
    metrics.admitted(Admission(8, 4, 9))
    metrics.rows(1, 2)
    metrics.anchors(1, 2, 0)
    metrics.seconds("replay", 0.1)
    labels = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels.setdefault((family.type, sample.name), set()).update(sample.labels)
    assert labels == {
        ("counter", "sglang:tail_replay_requests_total"): {"model_name", "kind"},
        ("counter", "sglang:tail_replay_hits_total"): {"model_name", "start"},
        ("counter", "sglang:tail_replay_matched_tokens_total"): {"model_name"},
        ("counter", "sglang:tail_replay_replayed_tokens_total"): {"model_name"},
        ("counter", "sglang:tail_replay_shrunk_hits_total"): {"model_name", "reason"},
        ("counter", "sglang:tail_replay_shrunk_tokens_total"): {"model_name"},
        ("histogram", "sglang:tail_replay_residual_bucket"): {"model_name", "le"},
        ("histogram", "sglang:tail_replay_residual_count"): {"model_name"},
        ("histogram", "sglang:tail_replay_residual_sum"): {"model_name"},
        ("histogram", "sglang:tail_replay_seconds_bucket"): {"model_name", "stage", "le"},
        ("histogram", "sglang:tail_replay_seconds_count"): {"model_name", "stage"},
        ("histogram", "sglang:tail_replay_seconds_sum"): {"model_name", "stage"},
        ("counter", "sglang:tail_replay_verified_hits_total"): {"model_name"},
        ("counter", "sglang:tail_replay_agreeing_hits_total"): {"model_name"},
        ("counter", "sglang:tail_replay_unverified_hits_total"): {"model_name"},
        ("histogram", "sglang:tail_replay_verified_kl_bucket"): {"model_name", "le"},
        ("histogram", "sglang:tail_replay_verified_kl_count"): {"model_name"},
        ("histogram", "sglang:tail_replay_verified_kl_sum"): {"model_name"},
        ("gauge", "sglang:tail_replay_rows_used"): {"model_name"},
        ("gauge", "sglang:tail_replay_rows_capacity"): {"model_name"},
        ("gauge", "sglang:tail_replay_anchors_used"): {"model_name"},
        ("gauge", "sglang:tail_replay_anchors_capacity"): {"model_name"},
        ("counter", "sglang:tail_replay_anchors_evicted_total"): {"model_name"},
    }


@pytest.mark.parametrize(
    "admission, kind, shrunk",
    [
        (Admission(0, 0, None), "cold", None),
        (Admission(40, 10, None), "replayed", None),
        (Admission(40, 0, None), "zero", None),
        (Admission(40, 10, 64), "replayed", 24),
        (Admission(0, 0, 64), "cold", 64),
        (Admission(40, 10, 64, shrunk_by=GENERATION), "replayed", 24),
        (Admission(40, 10, 64, shrunk_by=RESIDUAL), "replayed", 24),
    ],
)
def test_an_admission_counts(admission, kind, shrunk, registry):
    metrics = Metrics("m")
    metrics.admitted(admission)
    metrics.admitted(admission)
    found = samples(registry)
    counted = {other: found[key("requests_total", kind=other)] for other in REQUESTS}
    assert counted == {other: 2 * (other == kind) for other in REQUESTS}
    assert found[key("matched_tokens_total")] == 2 * admission.matched
    assert found[key("replayed_tokens_total")] == 2 * admission.replayed
    for reason in (ROWS_MISSING, GENERATION, RESIDUAL):
        counted = shrunk and reason == admission.shrunk_by
        assert found.get(key("shrunk_hits_total", reason=reason)) == (2 if counted else 0)
    assert found.get(key("shrunk_tokens_total")) == 2 * (shrunk or 0)


def test_residuals_count_where_they_are_told(registry):
    metrics = Metrics("m")
    for residual in (None, 0.0, 0.02):
        metrics.admitted(Admission(40, 10, None, residual=residual))
    found = samples(registry)
    assert (found[key("residual_count")], found[key("residual_sum")]) == (2, 0.02)
    assert [found[key("residual_bucket", le=le)] for le in ("0.0", "0.01", "0.03")] == [1, 1, 2]


def test_verified_hits_count(registry):
    metrics = Metrics("m")
    metrics.verified(Agreement(True, 0.02))
    metrics.verified(Agreement(False, 4.0))
    metrics.unverified(3)
    found = samples(registry)
    assert [found[key(f"{name}_hits_total")] for name in ("verified", "agreeing", "unverified")] == [2, 1, 3]
    assert found[key("verified_kl_sum")] == 4.02 and found[key("verified_kl_bucket", le="0.03")] == 1


@pytest.mark.parametrize(
    "admission, kind",
    [
        (Admission(40, 3, None, True, "exact"), "anchored"),
        (Admission(40, 40, None, False, "exact"), "replayed"),
        (Admission(40, 10, None, True, "seeded"), "seeded"),
        (Admission(40, 10, None, False, "zero"), "replayed"),
        (Admission(0, 0, None), "cold"),
    ],
)
def test_hits_are_counted_by_what_they_began_at(admission, kind, registry):
    metrics = Metrics("m")
    metrics.admitted(admission)
    found = samples(registry)
    assert found[key("requests_total", kind=kind)] == 1
    counts = {start: found[key("hits_total", start=start)] for start in ("exact", "seeded", "zero")}
    assert counts == {start: int(admission.matched > 0 and start == admission.start) for start in counts}


def test_rows_are_what_was_said_last(registry):
    metrics = Metrics("m")
    metrics.rows(5, 100)
    metrics.rows(3, 100)
    found = samples(registry)
    assert found[key("rows_used")] == 3 and found[key("rows_capacity")] == 100


def test_evicted_anchors_are_told_as_a_number_so_far_and_counted_once(registry):
    metrics = Metrics("m")
    assert samples(registry)[key("anchors_evicted_total")] == 0
    for used, evicted in ((2, 0), (9, 3), (9, 3), (4, 5)):
        metrics.anchors(used, 9, evicted)
    found = samples(registry)
    assert [found[key(f"anchors_{name}")] for name in ("used", "capacity", "evicted_total")] == [4, 9, 5]


@pytest.mark.parametrize("stage", ["fetch", "replay", "wait"])
def test_seconds_fall_into_buckets(stage, registry):
    metrics = Metrics("m")
    metrics.seconds(stage, 0.015)
    found = samples(registry)
    assert found[key("seconds_sum", stage=stage)] == 0.015
    below = [found[key("seconds_bucket", stage=stage, le=str(float(bound)))] for bound in SECONDS_BUCKETS]
    assert below == [bound >= 0.015 for bound in SECONDS_BUCKETS]


# ---- stopwatch ----


def test_on_a_cpu_the_body_is_timed():
    reports = []
    watch = Stopwatch(lambda *report: reports.append(report), cuda=False)
    with watch.measure("replay"):
        with watch.measure("fetch"):
            assert reports == []
    watch.harvest()
    (inner, fetch), (outer, replay) = reports
    assert (inner, outer) == ("fetch", "replay") and 0 <= fetch <= replay < 60


class FakeEvent:
    """A CUDA event on a device that is done with it when the test says so."""

    made = []

    def __init__(self, enable_timing):
        assert enable_timing
        self.done = False
        self.recorded = False
        FakeEvent.made.append(self)

    def record(self):
        self.recorded = True

    def query(self):
        return self.done

    def synchronize(self):
        raise AssertionError("a stopwatch never waits")

    def elapsed_time(self, end):
        assert self.recorded and end.recorded
        return 1500.0  # milliseconds


def test_on_a_gpu_a_time_is_reported_once_it_is_known(monkeypatch):
    FakeEvent.made = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=FakeEvent))
    reports = []
    watch = Stopwatch(lambda *report: reports.append(report), cuda=True)
    for stage in ("fetch", "replay"):
        with watch.measure(stage):
            pass
    watch.harvest()
    assert reports == []
    FakeEvent.made[1].done = True
    watch.harvest()
    assert reports == [("fetch", 1.5)]
    FakeEvent.made[3].done = True
    watch.harvest()
    watch.harvest()
    assert reports == [("fetch", 1.5), ("replay", 1.5)]
