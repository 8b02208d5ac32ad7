"""docs/grafana/tail-replay.json draws every metric of this project, and none that does not exist."""

import json
import re
from functools import partial
from pathlib import Path

import prometheus_client
import pytest

from sglang_tailreplay.metrics import Metrics
from sglang_tailreplay.scheduling import Admission
from sglang_tailreplay.verification import Agreement

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "tail-replay.json"
PREFIX = "sglang:tail_replay_"


@pytest.fixture
def samples(monkeypatch) -> list:
    """All that a server tells with a hit that shrank, one that was verified, a saved state, and each time once."""
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    metrics = Metrics("m")
    metrics.admitted(Admission(8, 4, 9))
    metrics.rows(1, 2)
    metrics.anchors(1, 2, 0)
    metrics.verified(Agreement(True, 0.1))
    metrics.unverified(1)
    for stage in ("fetch", "replay", "wait"):
        metrics.seconds(stage, 0.1)
    return [s for family in registry.collect() for s in family.samples if not s.name.endswith("_created")]


@pytest.fixture(scope="module")
def expressions() -> list[str]:
    dashboard = json.loads(FILE.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_is_drawn_and_no_other(expressions, samples):
    drawn = {name for text in expressions for name in re.findall(rf"{PREFIX}\w+", text)}
    assert drawn == {sample.name for sample in samples}


def test_labels_in_queries_exist(expressions, samples):
    labels = {sample.name: set(sample.labels) for sample in samples}
    values = {label: {sample.labels[label] for sample in samples if label in sample.labels} for label in ("stage",)}
    for text in expressions:
        for name, selector in re.findall(rf"({PREFIX}\w+)\{{([^}}]*)\}}", text):
            named = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector))
            assert set(named) <= labels[name], text
            assert named.get("stage", "fetch") in values["stage"], text
        for grouped in re.findall(r"by \((\w+)\)", text):
            (name,) = set(re.findall(r"sglang:\w+", text))
            assert grouped in labels.get(name, {grouped}), text


def test_panels_do_not_overlap():
    panels = json.loads(FILE.read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
