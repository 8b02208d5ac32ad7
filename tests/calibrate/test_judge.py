"""What follows from samples: recommended is only what was measured at every length and is good enough there."""

import math

import pytest

from sglang_tailreplay.calibrate.judge import LEAST_PROMPTS, Sample, Wanted, divergence, recommend, score
from sglang_tailreplay.calibrate.plan import Cell, Setting, cells, control, grid

LENGTHS = (1000, 4000)
SETTINGS = grid((0.05, 0.1, 1.0), (64,), (None,), (0, 512))
WANTED = Wanted(0.9, None)


def samples(share: float, replayed: int, prompts: int = 20, positions: int = 20, kl: float = 0.0) -> list[Sample]:
    """Each prompt agrees at this share of its positions."""
    agreed = tuple(i < round(share * positions) for i in range(positions))
    return [Sample(agreed, (kl,) * positions, replayed, share == 1.0)] * prompts


def scores(shares, prompts: int = 20, kl: float = 0.0):
    """Of every cell: shares(cell) agree."""
    every = [cell for found in cells(SETTINGS, LENGTHS).values() for cell in found]
    return {cell: score(samples(shares(cell), cell.tail, prompts, kl=kl)) for cell in every}


def test_the_cheapest_setting_that_is_good_enough_everywhere():
    verdict = recommend(SETTINGS, LENGTHS, scores(lambda c: 1.0 if c.tail >= 0.1 * c.length else 0.5), WANTED)
    assert verdict.setting == Setting(0.1, 64, None, 0)


def test_one_bad_length_is_enough_to_rule_a_setting_out():
    bad = Cell(0, 4000, 400)
    verdict = recommend(SETTINGS, LENGTHS, scores(lambda c: 0.5 if c == bad or c.tail < 100 else 1.0), WANTED)
    assert verdict.setting == Setting(0.1, 64, None, 512)


def test_anchors_win_only_where_they_replay_less():
    everywhere = scores(lambda c: 1.0)
    assert recommend(SETTINGS, LENGTHS, everywhere, WANTED).setting == Setting(0.05, 64, None, 0)
    anchored = {c: s._replace(replayed=10.0) if c.anchor_interval else s for c, s in everywhere.items()}
    assert recommend(SETTINGS, LENGTHS, anchored, WANTED).setting.anchor_interval == 512


@pytest.mark.parametrize("prompts", [0, LEAST_PROMPTS - 1])
def test_nothing_is_recommended_for_a_length_that_was_hardly_measured(prompts):
    found = scores(lambda c: 1.0)
    thin = {c: score(samples(1.0, c.tail, prompts)) if prompts else None for c in found if c.length == 4000}
    found = {c: s for c, s in {**found, **thin}.items() if s is not None}
    verdict = recommend(SETTINGS, LENGTHS, found, WANTED)
    assert verdict.setting is None and "length 4000" in verdict.reason and "--lengths" in verdict.reason


def test_a_setting_with_a_cell_that_failed_is_not_recommended():
    found = scores(lambda c: 1.0)
    del found[Cell(0, 1000, 64)]
    assert recommend(SETTINGS, LENGTHS, found, WANTED).setting == Setting(0.05, 64, None, 512)


def test_where_a_full_replay_is_not_good_enough_that_is_said():
    verdict = recommend(SETTINGS, LENGTHS, scores(lambda c: 0.85), WANTED)
    assert verdict.setting is None and "rounding" in verdict.reason and "--agreement" in verdict.reason


def test_where_no_setting_is_good_enough_the_nearest_and_the_way_out_are_told():
    short = grid((0.05, 0.1), (64,), (None,), (0,))
    found = {c: score(samples(1.0 if c == control(c.length) else c.tail / c.length, c.tail))
             for c in cells(short, LENGTHS)[0]}  # fmt: skip
    verdict = recommend(short, LENGTHS, found, WANTED)
    assert verdict.setting is None and "ratio 0.1" in verdict.reason and "--anchor-intervals" in verdict.reason


def test_the_lower_end_of_the_interval_decides():
    found = scores(lambda c: 1.0, prompts=LEAST_PROMPTS)
    low = min(one.low for one in found.values())
    assert 0.9 < low < 0.99
    assert recommend(SETTINGS, LENGTHS, found, Wanted(low, None)).setting
    assert recommend(SETTINGS, LENGTHS, found, Wanted(low + 1e-6, None)).setting is None


def test_kl_has_a_limit_of_its_own():
    found = scores(lambda c: 1.0, kl=0.02)
    assert recommend(SETTINGS, LENGTHS, found, Wanted(0.9, 0.021)).setting
    assert recommend(SETTINGS, LENGTHS, found, Wanted(0.9, 0.019)).setting is None


def test_prompts_that_fail_as_a_whole_widen_the_interval():
    even = score(samples(0.5, 1))
    halves = score(samples(1.0, 1, prompts=10) + samples(0.0, 1, prompts=10))
    assert even.agreement == halves.agreement == 0.5
    assert halves.high - halves.low > 2 * (even.high - even.low)


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares)}


def test_divergence_of_whole_distributions():
    cold, hit = (0.7, 0.2, 0.1), (0.1, 0.2, 0.7)
    expected = sum(p * math.log(p / q) for p, q in zip(cold, hit, strict=True))
    assert divergence(logs(*cold), logs(*hit)) == pytest.approx(expected)
    assert divergence(logs(*cold), logs(*cold)) == 0


def test_divergence_of_a_part_is_a_lower_bound_that_sees_where_the_rest_went():
    cold, hit = (0.7, 0.2, 0.06, 0.04), (0.1, 0.2, 0.5, 0.2)
    whole = divergence(logs(*cold), logs(*hit))
    part = divergence(logs(*cold[:2]), logs(*hit))
    rest = 0.1 * math.log(0.1 / 0.7)
    assert part == pytest.approx(0.7 * math.log(7) + rest)
    assert 0 < part <= whole
    assert divergence(logs(0.999), logs(1e-9, 1.0 - 1e-9)) > 15


def test_a_replay_that_went_past_a_maximum_does_not_speak_for_it():
    """Replays round up to the size of a graph; a server with a maximum rounds no further than that."""
    settings = grid((1.0,), (64,), (500, 512), (0,))
    found = {c: score(samples(1.0 if c.tail == c.length else 0.95, 512 if c.tail in (500, 512) else c.tail))
             for c in cells(settings, LENGTHS)[0]}  # fmt: skip
    verdict = recommend(settings, LENGTHS, found, WANTED)
    assert verdict.setting == Setting(1.0, 64, 512, 0)
    alone = recommend(settings[:1], LENGTHS, found, WANTED)
    assert alone.setting is None and "--max-tokens" in alone.reason


def test_of_equal_settings_the_one_without_a_maximum_is_taken():
    settings = grid((0.05,), (64, 128), (2048, None, 4096), (0,))
    found = {c: score(samples(1.0, c.tail)) for c in cells(settings, LENGTHS)[0]}
    assert recommend(settings, LENGTHS, found, WANTED).setting == Setting(0.05, 64, None, 0)
    bounded = tuple(one for one in settings if one.max_tokens)
    assert recommend(bounded, LENGTHS, found, WANTED).setting == Setting(0.05, 64, 4096, 0)


def test_no_samples_have_no_score():
    with pytest.raises(ValueError):
        score([])
