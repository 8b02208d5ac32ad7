"""What an operator sees of the scores."""

from sglang_tailreplay.calibrate import report
from sglang_tailreplay.calibrate.judge import Sample, score
from sglang_tailreplay.calibrate.plan import Cell


def scores():
    one = score([Sample((True, True, False, True), (0.0, 0.0, 0.5, 0.0), 70, False)] * 10)
    return {Cell(0, 1000, 64): one, Cell(0, 1000, 1000): one, Cell(512, 1000, 64): one._replace(exact=1.0)}


def test_a_line_per_cell_under_its_anchor_interval():
    first, second = report.table(scores()).split("\n\n")
    assert first.startswith("no anchors:") and second.startswith("anchors every 512 tokens:")
    assert len(first.splitlines()) == 4 and len(second.splitlines()) == 3
    line = first.splitlines()[2].split()
    assert line[:5] == ["1,000", "64", "(6%)", "70", "0%"] and line[5] == "0.750" and line[7] == "0.1250"
    assert "100%" in second
    assert len({len(line) for line in first.splitlines()[1:]}) == 1


def test_the_plot_is_drawn(tmp_path):
    drawn = report.draw(scores(), "M", 0.95, tmp_path / "calibration.json")
    assert [path.name for path in drawn] == ["calibration.svg", "calibration.png"]
    text = drawn[0].read_text()
    assert "<svg" in text and drawn[1].stat().st_size > 1000
