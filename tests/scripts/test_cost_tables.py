"""docs/cost-model.md says what scripts/cost_model computes."""

from pathlib import Path

import cost_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"


def test_the_page_has_every_table_as_it_is_computed():
    page = PAGE.read_text()
    for table in cost_tables.tables():
        assert table in page, f"scripts/cost_model prints another table than the page has:\n{table}"


def test_what_the_page_says_of_its_predictions_holds():
    page = PAGE.read_text()
    assert "within 12 % on the 4B and within 16 % on the 27B, but for one request" in page
    for name, limit, more in (("qwen3.5-4b", 0.12, 0), ("qwen3.6-27b", 0.16, 1)):
        off = [abs(predicted / measured - 1) for *_, measured, predicted in cost_tables.checks(name)]
        assert sum(one > limit for one in off) == more, name
