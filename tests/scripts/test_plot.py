"""Every figure in docs/ is one that scripts/plot draws from a document beside it."""

import json
from pathlib import Path

import plot
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
ENDINGS = (".svg", ".png")


def drawn_from_documents() -> set[str]:
    """Names, without ending, of the figures of all documents in docs/results."""
    names = set()
    for path in (DOCS / "results").glob("*.json"):
        if path.name.endswith(".timeline.json"):  # the summary of a trace that was drawn; traces are too large to keep
            names.add(path.stem)
            continue
        try:
            names.add(plot.figure_of(path, json.loads(path.read_text())).path.stem)
        except ValueError:
            continue
    return names


def test_every_figure_has_a_document_that_it_is_drawn_from():
    figures = {path.stem for path in DOCS.rglob("*") if path.suffix in ENDINGS}
    assert figures - drawn_from_documents() == {"mechanism"}


RESULT = {"hit_tokens": 50, "prompt_tokens": 100, "ttft_ms": {"p50": 10, "p90": 20, "p99": 30}}
WORKLOADS = {
    **{"tool": "workload", "shape": "some/qwen3.5-4b", "machine": {"gpus": ["NVIDIA H200, 1, 2"], "cpu": "c"}},
    "results": [
        {"workload": "rag", "server": "stock", **RESULT},
        {"workload": "rag", "server": "ours", **RESULT},
        {"workload": "chat", "server": "stock", **RESULT},  # cut off before the other server's turn
    ],
}


def test_workloads_and_the_mechanism_are_drawn(tmp_path, capsys):
    (tmp_path / "x.json").write_text(json.dumps(WORKLOADS))
    assert plot.main([str(tmp_path / "x.json"), "--mechanism", str(tmp_path / "mechanism.svg")]) == 0
    written = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    for name in ("workloads-qwen3.5-4b", "mechanism"):
        assert all(written[name + ending] > 5000 for ending in ENDINGS)
    assert written["mechanism.svg"] < 40_000 and "recurrent state" in (tmp_path / "mechanism.svg").read_text()


@pytest.mark.parametrize("document", [{"engines": {}}, {"ok": True, "kinds": {}}])
def test_a_document_without_a_figure_is_named(tmp_path, capsys, document):
    path = tmp_path / "soak.json"
    path.write_text(json.dumps(document))
    assert plot.main([str(path)]) == 1
    assert f"error: {path}: nothing to draw" in capsys.readouterr().err
