"""Metrics, intervals and tables of eval_quality."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality import intervals, metrics, paired, plot, summary
from quality.answers import Answer

# ---------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [("they are 12 and 34.", ["12", "34"], 1), ("12", ["12", "34"], 0.5), ("", ["12"], 0), ("ABC", ["abc"], 1)],
)
def test_all_found_counts_references(answer, references, score):
    assert metrics.all_found(answer, references) == score


def test_any_found_needs_one_reference():
    assert metrics.any_found("In the North, it was.", ["south", "the north"]) == 1
    assert metrics.any_found("In the West.", ["south", "the north"]) == 0


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The cat!", "a cat", 1),  # articles, punctuation and case do not count
        ("the theatre", "theatre", 1),  # only whole words are articles
        ("black cat sat", "black dog", 2 * (1 / 3 * 1 / 2) / (1 / 3 + 1 / 2)),
        ("no no no", "no", 0.5),  # a word counts as often as the reference has it
        ("dog", "cat", 0),
        ("", "cat", 0),
        ("the", "an", 0),  # nothing is left of either
    ],
)
def test_token_f1(answer, reference, score):
    assert metrics.token_f1(answer, [reference]) == pytest.approx(score)


def test_the_best_reference_counts():
    assert metrics.token_f1("cat", ["dog", "a cat"]) == 1
    assert metrics.rouge_l("the cat sat", ["no", "the cat sat"]) == 1
    assert metrics.same_ids([1, 2], [[3, 4], [1, 4]]) == 0.5


def test_rouge_l_wants_words_in_order():
    assert metrics.rouge_l("the cat sat down", ["the dog sat"]) == pytest.approx(2 * (2 / 4 * 2 / 3) / (2 / 4 + 2 / 3))
    assert metrics.rouge_l("sat cat the", ["the cat sat"]) == pytest.approx(1 / 3)
    assert metrics.rouge_l("", ["the cat"]) == 0


@given(st.text("abc", max_size=9), st.text("abc", max_size=9))
def test_longest_common_subsequence(a, b):
    assert metrics.longest_common(a[:6], b[:6]) == by_trying(a[:6], b[:6])
    assert metrics.longest_common(a, b) == metrics.longest_common(b, a) <= min(len(a), len(b))


def by_trying(a, b):
    """By trying all subsequences of a."""
    best = 0
    for chosen in range(1 << len(a)):
        part = [c for i, c in enumerate(a) if chosen >> i & 1]
        rest = iter(b)
        if all(c in rest for c in part):
            best = max(best, len(part))
    return best


def test_same_ids_compares_place_by_place():
    assert metrics.same_ids([5, 6, 7], [[5, 6, 7]]) == 1
    assert metrics.same_ids([6, 5], [[5, 6, 7, 8]]) == 0
    assert metrics.same_ids([5], [[5, 6, 7, 8]]) == 0.25


# ---------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (1, 1, 0.2065, 1), (95, 100, 0.8882, 0.9785)],
)
def test_wilson(successes, n, low, high):
    estimate = intervals.wilson(successes, n)
    assert estimate == pytest.approx((successes / n, low, high), abs=1e-4)


def test_zeros_and_ones_get_wilsons_interval():
    assert intervals.mean([1, 1, 0, 1]) == intervals.wilson(3, 4)
    assert intervals.mean([1, 1, 0.5, 1]) != intervals.wilson(3.5, 4)


def test_a_bootstrap_is_about_two_standard_errors_wide_and_repeatable():
    scores = [i / 100 for i in range(101)]
    value, low, high = intervals.mean(scores)
    error = 0.2915 / 101**0.5
    assert value == pytest.approx(0.5)
    assert (low, high) == pytest.approx((0.5 - 1.96 * error, 0.5 + 1.96 * error), abs=0.01)
    assert intervals.mean(scores) == intervals.mean(scores)


def test_cells_weigh_the_same():
    assert intervals.mean_of_cells([[1.0], [0.0, 0.5, 0.5, 0.0]]).value == pytest.approx(0.625)


def test_a_mean_of_cells_is_surer_than_each_cell_and_never_certain():
    one = intervals.mean([0] * 20)
    value, low, high = intervals.mean_of_cells([[0] * 20] * 4)
    assert (value, low) == (0, 0) and high == pytest.approx(one.high / 2)
    assert intervals.mean_of_cells([[0, 1, 1]]) == pytest.approx(intervals.mean([0, 1, 1]))


def test_a_ratio_is_of_the_same_prompts():
    cells = [[0.1, 0.9, 0.4], [0.2, 0.3]]
    assert intervals.ratio_of_cells(cells, cells) == pytest.approx((1, 1, 1))
    halves = [[score / 2 for score in cell] for cell in cells]
    assert intervals.ratio_of_cells(halves, cells) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="pairs"):
        intervals.ratio_of_cells([[1.0]], [[1.0, 1.0]])


def test_nothing_is_a_share_of_zero():
    assert intervals.ratio_of_cells([[1.0, 0.0]], [[0.0, 0.0]]) is None
    assert intervals.ratio_of_cells([[1.0, 0.0]], [[0.0, 1.0]]) is None  # a resample has no full score


def test_a_difference_of_equal_scores_has_a_width():
    found = intervals.difference([1, 0, 1, 1], [1, 0, 1, 1])
    assert found.value == 0 and found.low == -found.high < -0.4
    assert intervals.difference([1] * 1000, [1] * 1000).high < 0.006


def test_a_difference_knows_whose_scores_changed():
    worse = intervals.difference([0.0] * 30 + [1.0] * 170, [1.0] * 200)
    assert worse.value == pytest.approx(-0.15) and -0.22 < worse.low < worse.high < -0.09
    better = intervals.difference([1.0] * 200, [0.0] * 30 + [1.0] * 170)
    assert better == pytest.approx((-worse.value, -worse.high, -worse.low))
    # As many won as lost: wider than where nobody's score changed, and around zero.
    both = intervals.difference([0.0] * 50 + [1.0] * 150, [1.0] * 150 + [0.0] * 50)
    assert both.value == 0 and both.high > 0.08 and both.low == pytest.approx(-both.high)
    with pytest.raises(ValueError, match="pairs"):
        intervals.difference([1.0], [])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_a_difference_lies_in_its_interval(pairs):
    ours, theirs = zip(*pairs, strict=True)
    found = intervals.difference(ours, theirs)
    assert found.value == pytest.approx(sum(ours) / len(ours) - sum(theirs) / len(theirs), abs=1e-9)
    assert -1 <= found.low <= found.value <= found.high <= 1


# ---------------------------------------------------------------------------------------------------- tables


def answer(index, variant, score, cell="ruler/niah@1024", cut="question", output=(1, 2), replayed=50):
    cut = None if variant == "full" else cut
    boundary = 0 if variant == "full" else 1000
    replayed = 0 if variant in ("full", "zero") else replayed
    return Answer(
        *(f"{cell}/{index}", cell, cut, variant, "digest", 1010, boundary, boundary, replayed, 1, list(output)),
        *(None, score, 0.1),
    )


def run_of(count, **scores):
    """Answers of `count` prompts, the same score for all of a variant."""
    return [answer(i, variant, score) for i in range(count) for variant, score in scores.items()]


ALL = {"full": 1.0, "zero": 0.0, "r=0.05": 0.5, "r=0.1": 1.0}


def test_only_prompts_with_all_variants_count():
    answers = [*run_of(3, **ALL), answer(3, "full", 1.0), answer(3, "zero", 1.0)]
    (cell,) = summary.cells(answers, "question")
    assert cell.count == 3 and cell.scores["zero"] == [0, 0, 0]
    assert list(cell.scores) == ["full", "zero", "r=0.05", "r=0.1"]


def test_a_cell_keeps_its_prompts_when_another_one_gets_a_variant_more():
    answers = run_of(3, **ALL) + [answer(0, v, 1.0, cell="ruler/vt@2048") for v in (*ALL, "r=0.2")]
    numbers = summary.document(answers)["question"]
    assert {label: one["prompts"] for label, one in numbers["cells"].items()} == {"R-niah@1K": 3, "R-vt@2K": 1}
    assert "r=20%" not in summary.table_1(numbers, "M") + summary.notes(numbers)
    niah, vt = summary.table_3(numbers, "M").splitlines()[2:]
    assert niah.endswith(" - |") and not vt.endswith(" - |")


def test_a_cell_that_was_not_asked_at_a_cut_is_not_there():
    answers = run_of(2, **ALL) + [answer(0, v, 1.0, cell="ruler/vt@2048", cut="random") for v in ALL]
    assert [cell.label for cell in summary.cells(answers, "question")] == ["R-niah@1K"]
    assert [cell.label for cell in summary.cells(answers, "random")] == ["R-vt@2K"]
    assert [cell.label for cell in summary.cells(run_of(2, full=1.0), "question")] == ["R-niah@1K"]


def test_full_prefill_belongs_to_every_cut():
    answers = [*run_of(2, **ALL), *(answer(i, v, 0.25, cut="random") for i in range(2) for v in ALL if v != "full")]
    question, random = (summary.cells(answers, cut)[0] for cut in ("question", "random"))
    assert question.scores["full"] == random.scores["full"] == [1, 1]
    assert (question.scores["r=0.05"], random.scores["r=0.05"]) == ([0.5, 0.5], [0.25, 0.25])


def test_table_1_has_the_mean_over_cells_and_the_share_of_full():
    answers = run_of(2, **ALL)
    other = {**ALL, "r=0.05": 0.1}
    answers += [answer(i, v, score, cell="ruler/vt@2048") for i in range(4) for v, score in other.items()]
    text = summary.table_1(summary.document(answers)["question"], "M")
    assert "RULER Full | RULER Zero-only | RULER r=5% | RULER r=10%" in text
    assert "| M | 1.000 [0.590, 1.000] |" in text and "0.300 [0.300, 0.300] (30.0% [30.0%, 30.0%])" in text


def test_table_3_has_every_cell_once():
    cells = ("ruler/vt@2048", "longbench/qmsum@16384", "ruler/vt@1000")
    answers = [answer(0, v, score, cell=cell) for cell in cells for v, score in ALL.items()]
    text = summary.table_3(summary.document(answers)["question"], "M")
    assert [line.split(" | ")[1] for line in text.splitlines()[2:]] == ["LB-qmsum@16K", "R-vt@1000", "R-vt@2K"]


def test_notes_tell_what_was_replayed_and_what_is_the_same():
    answers = [answer(i, "full", 1, output=(1, 2)) for i in range(4)]
    answers += [answer(i, "r=0.05", 1, output=(1, 2) if i else (1, 3), replayed=64) for i in range(4)]
    text = summary.notes(summary.document(answers)["question"])
    assert text == "- r=5%: 6.4%–6.4% of the cached tokens replayed; answers equal to full prefill's: RULER 75.0%"


def test_a_run_without_full_prefill_has_no_shares():
    numbers = summary.document(run_of(3, **{"zero": 0.0, "r=0.05": 0.5}))
    assert "%" not in summary.table_1(numbers["question"], "M").replace("r=5%", "")
    assert "equal" not in summary.notes(numbers["question"])


def test_nothing_to_tell_is_said():
    assert "No prompt" in summary.tables(summary.document([]), "M")


@pytest.mark.parametrize(("wrong", "broken"), [(0, False), (1, False), (2, True), (10, True)])
def test_a_replay_of_all_rows_must_begin_as_full_prefill_does(wrong, broken):
    answers = [answer(i, "full", 1, output=(1, 2)) for i in range(10)]
    answers += [answer(i, "r=1", 1, output=(9,) if i < wrong else (1, 7)) for i in range(10)]
    answers += [answer(i, "r=0.05", 0, output=(9,)) for i in range(10)]
    assert [("replay of this server is broken" in problem) for problem in summary.problems(answers)] == [True] * broken


def test_the_plot_has_a_line_for_every_cell_and_the_mean(tmp_path):
    numbers = summary.document(run_of(4, **ALL))
    ((title, lines),) = plot.panels(numbers)
    assert title == "RULER, cut: question" and list(lines) == ["R-niah@1K", "mean"]
    assert [point[:2] for point in plot.points(lines["mean"]["variants"])] == [(0, 0), (5, 0.5), (10, 1)]
    assert plot.tail_points(lines["mean"]["variants"]) == []
    score = {"value": 0.5, "low": 0.25, "high": 1.0}
    tails = {"k=1024": {"score": score}, "full": {"score": score}, "k=64": {"score": score}}
    assert plot.tail_points(tails) == [(64, 0.5, 0.25, 0.5), (1024, 0.5, 0.25, 0.5)]
    written = plot.draw(numbers, "M", tmp_path / "quality.svg")
    assert all(path.stat().st_size > 1000 for path in written) and len(written) == 2
    assert plot.draw(summary.document([]), "M", tmp_path / "none.svg") == []


def test_pairs_count_all_prompts_that_two_modes_have():
    """Where the time ends, some modes have more prompts than others; a cell counts those that all of them have."""
    answers = run_of(2, **ALL) + [answer(i, v, 1.0) for i in (2, 3) for v in ("full", "r=0.1")]
    answers += [answer(i, v, 0.5, cell="ruler/niah@16384") for i in range(3) for v in ("full", "r=0.1")]
    answers += [answer(4, "r=0.1", 1.0)]  # nothing to compare it with
    found = summary.document(answers)["question"]["paired"]["ruler"]
    assert {v: one["prompts"] for v, one in found["all"].items()} == {"full": 7, "zero": 2, "r=0.05": 2, "r=0.1": 7}
    assert list(found["cells"]) == ["niah@1024", "niah@16384"] and list(found["lengths"]) == ["@1024", "@16384"]
    zero = found["tasks"]["niah"]["zero"]
    assert (zero["score"]["value"], zero["full"], zero["difference"]["value"], zero["same"]) == (0, 1, -1, 2)
    assert (
        "| Zero-only | 2 | 0.00 [0.00, 0.66] | 0.00 [0.00, 0.66] | -1.000 [-1.000, -0.070] | 100.0% |"
        in paired.table(found, summary.title)
    )


def test_pairs_tell_what_rows_add_to_a_plain_extend():
    answers = run_of(9, **{**ALL, "plain=0.05": 0.25})
    rows = summary.document(answers)["question"]["paired"]["ruler"]["rows"]
    assert list(rows) == ["r=0.05"] and rows["r=0.05"]["difference"]["value"] == 0.25
    assert summary.document(run_of(9, zero=0.0))["question"]["paired"] == {"ruler": {}}


def test_many_cells_are_drawn_by_task():
    cells = [f"ruler/{task}@{1024 << i}" for task in ("niah", "vt") for i in range(5)]
    answers = [answer(0, v, score, cell=cell) for cell in cells for v, score in ALL.items()]
    ((_, lines),) = plot.panels(summary.document(answers))
    assert list(lines) == ["niah", "vt", "mean"]
    assert [point[:2] for point in plot.points(lines["vt"]["variants"])] == [(0, 0), (5, 0.5), (10, 1)]


def test_the_notes_tell_what_lay_under_a_seeded_replay():
    seeded = [replace(answer(i, "seeded", 1.0), start=start) for i, start in enumerate(["seeded", "exact", "seeded"])]
    text = summary.notes(summary.document([*run_of(3, full=1.0), *seeded])["question"])
    assert "Seeded: " in text and "67% or more of them on an older state" in text


def test_columns_have_an_order():
    wanted = ["full", "zero", "plain=0.05", "r=0.05", "r=0.2", "k=64", "k=512", "seeded", "anchored=512", "again"]
    assert summary.order(reversed(wanted)) == wanted
    assert [summary.title(v) for v in ("plain=0.05", "k=64", "anchored=512", "again")] == [
        *("plain 5%", "k=64", "anchored 512", "Full again"),
    ]
