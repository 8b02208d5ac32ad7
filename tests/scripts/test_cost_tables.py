"""docs/cost-model.md says what scripts/cost_model computes."""

from pathlib import Path

import cost_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"


def test_the_page_has_every_table_as_it_is_computed():
    page = PAGE.read_text()
    for table in cost_tables.tables():
        assert table in page, f"scripts/cost_model prints another table than the page has:\n{table}"


def test_what_the_page_says_of_its_predictions_holds():
    """How far they are off, but for hits from saved states on the 4B shape, which the page explains."""
    page, off = PAGE.read_text(), {}
    for name in cost_tables.MEASURED:
        for what, *_, measured, predicted in cost_tables.checks(name):
            saved = what == "hit from a saved state"
            off.setdefault((name, saved), []).append(abs(predicted / measured - 1))
    assert max(off["qwen3.5-4b", False]) <= 0.18 and max(off["qwen3.6-27b", False]) <= 0.09
    assert "within 18 %" in page and "within 9 %" in page
    assert 0.22 <= min(off["qwen3.5-4b", True]) and max(off["qwen3.5-4b", True]) <= 0.30 and "23 to 30 %" in page
