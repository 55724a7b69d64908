"""Intervals against scipy's and in simulation; paired comparisons and their adjustment."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_rob.metrics import (
    clopper_pearson,
    holm,
    mcnemar,
    paired,
    paired_p,
    student,
    wilson,
    wilson_over_draws,
)
from lightning_rob.metrics.gaffke import p_at_most
from lightning_rob.metrics.intervals import paired_over_draws


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (7, 10), (123, 1000)])
def test_wilson_is_scipys(right, n, level):
    expected = stats.binomtest(right, n).proportion_ci(level, "wilson")
    assert wilson(right / n, n, level) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mean", [0.0, 1.0, 0.3, 1 + 2e-7, -1e-9])
def test_wilson_stays_a_proportion(mean):
    """Also where the mean of float32 scores came out a little above one."""
    for n in (*range(1, 200), 50_000):
        low, high = wilson(mean, n)
        assert 0 <= low <= high <= 1
        assert low - 1e-6 <= mean <= high + 1e-6
    assert wilson(mean, 0) == wilson(math.nan, 0) == (0.0, 1.0)


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.5, 0.95])
def test_wilson_covers_the_truth(truth):
    """Coverage of the 95 % interval: exact, over the distribution of the number right."""
    n = 200
    weights = stats.binom.pmf(np.arange(n + 1), n, truth)
    inside = [low <= truth <= high for low, high in (wilson(k / n, n) for k in range(n + 1))]
    assert 0.92 < weights[inside].sum() < 0.98


def test_wilson_is_wide_enough_for_expected_accuracies():
    """Scores of 0, 0.1, 0.9 and 1 vary less than scores of 0 and 1 with the same mean."""
    scores = np.random.default_rng(1).choice([0, 0.1, 0.9, 1], (2000, 100), p=[0.2, 0.3, 0.3, 0.2])
    inside = [low <= 0.5 <= high for low, high in (wilson(m, 100) for m in scores.mean(1))]
    assert np.mean(inside) > 0.95


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize("values", [[0.4, 0.5], [0.1, 0.2, 0.35, 0.1], list(range(30))])
def test_student_is_scipys(values, level):
    expected = stats.t.interval(
        level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )
    assert student(values, level) == pytest.approx(expected, abs=1e-12)
    assert student([0.25] * len(values), level) == (0.25, 0.25)
    with pytest.raises(ValueError, match="two"):
        student(values[:1])


def test_clopper_pearson_has_known_values():
    assert clopper_pearson(7, 20) == pytest.approx((0.1539, 0.5922), abs=1e-4)
    assert clopper_pearson(0, 0) == (0.0, 1.0)


def bits(text):
    return torch.tensor([float(c) for c in text])


def test_mcnemar_by_hand():
    before, after = bits("1111100000"), bits("0000010000")  # 5 lost, 1 won
    expected = 2 * sum(math.comb(6, k) for k in (0, 1)) / 2**6
    assert mcnemar(before, after) == pytest.approx(expected)
    assert mcnemar(after, before) == pytest.approx(expected)
    assert mcnemar(before, before) == 1.0


def test_which_test_depends_on_the_scores():
    certain = paired(bits("11110"), bits("10010"))
    assert (certain.test, certain.difference) == ("McNemar", pytest.approx(-0.4))
    assert certain.p == pytest.approx(0.5)
    assert paired_p(bits("11110"), bits("10010")) == certain.p
    one, other = torch.tensor([0.5, 1.0, 0.5, 0.2]), torch.tensor([0.4, 0.8, 0.4, 0.0])
    assert paired(one, other).test == "Gaffke"
    assert paired(one, other).difference == pytest.approx(-0.15)
    assert paired(one.repeat(50), other.repeat(50)).p < 1e-6
    assert paired_p(other, one) == paired_p(one, other)
    with pytest.raises(ValueError, match="not numbers"):
        paired(one, other * math.nan)
    with pytest.raises(ValueError, match="3 scores cannot be paired with 2"):
        paired(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("n", [0, 1, 20])
def test_equal_scores_do_not_differ(n):
    """The interval is Clopper and Pearson's for none of n images, in both directions."""
    same = paired(torch.ones(n), torch.ones(n))
    end = clopper_pearson(0, n)[1]
    assert (same.p, same.interval) == (1.0, pytest.approx((-end, end), abs=1e-6))


@pytest.mark.parametrize(("lost", "won"), [(5, 0), (6, 0), (9, 1), (30, 14), (700, 1), (0, 3)])
@pytest.mark.parametrize("both", [0, 40])
def test_mcnemars_test_is_a_case_of_gaffkes(lost, won, both):
    before = torch.tensor([1.0] * lost + [0.0] * won + [1.0] * both)
    after = torch.tensor([0.0] * lost + [1.0] * won + [1.0] * both)
    found = paired(before, after)
    assert found.p == pytest.approx(mcnemar(before, after), rel=1e-9)
    assert found.significant == (found.interval[0] > 0 or found.interval[1] < 0)


def test_an_interval_of_two_values_is_clopper_and_pearsons():
    """All images lost or won, so the difference is a proportion, scaled to -1 … 1."""
    low, high = clopper_pearson(7, 20)
    before, after = torch.tensor([0.0] * 7 + [1.0] * 13), torch.tensor([1.0] * 7 + [0.0] * 13)
    expected = (2 * low - 1, 2 * high - 1)
    assert paired(before, after).interval == pytest.approx(expected, abs=1e-6)


def test_p_of_equal_differences_is_known():
    """Twenty differences of 0.1: the probability that their weights, times 0.1, are below one's."""
    found = paired(torch.full((20,), 0.9).double(), torch.ones(20).double())
    assert found.p == pytest.approx(2 * 1.1**-20)
    assert p_at_most(np.ones(1000), 0.99) == pytest.approx(0.995**1000, rel=1e-3)
    assert paired(torch.zeros(20_000), torch.ones(20_000)).p > 0


def test_p_is_the_share_of_random_weights():
    """By its definition: weights of uniform spacings, and -1 for what was not drawn."""
    draws = np.random.default_rng(0)
    gaps = draws.choice([-0.5, 0.03, 0.2, 0.7], 15)
    weights = draws.exponential(size=(100_000, 16))
    for mean in (-0.2, 0.0, 0.1):
        share = (weights @ np.append(gaps - mean, -1 - mean) <= 0).mean()
        assert p_at_most(gaps, mean) == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("n", [12, 50])
def test_a_network_rarely_differs_from_an_ensemble_of_its_accuracy(n):
    """Each is right with probability 0.9, the network on nine images of ten, the ensemble on all.

    The t test calls 29 % (n = 12) and 12 % (n = 50) of these pairs different.
    """
    draws = np.random.default_rng(2)
    ensemble = torch.full((n,), 0.9).double()
    found = [paired(torch.tensor(draws.random(n) < 0.9).double(), ensemble) for _ in range(120)]
    assert np.mean([one.significant for one in found]) < 0.05
    assert min(one.p for one in found) > 0
    covered = [one.interval[0] <= 0 <= one.interval[1] for one in found]
    assert covered == [not one.significant for one in found]


@pytest.mark.parametrize("draws", [1, 5])
def test_draws_that_all_images_share_are_not_taken_for_images(draws):
    """Two attacks are equally strong; draws move an accuracy of 0.8 by 4 points or so."""
    generator, significant = np.random.default_rng(3), []
    for _ in range(100):
        chance = (0.8 + generator.normal(0, 0.04, (2, 1, draws))).clip(0, 1)
        scores = torch.from_numpy((generator.random((2, 500, draws)) < chance).astype(float))
        found = paired_over_draws(*scores)
        alone = paired(*scores.mean(2)).significant
        significant.append((found.significant, alone))
        low, high = found.interval
        assert found.significant == (not low <= 0 <= high)
    of_both, of_images = np.mean(significant, 0)
    assert of_images > 0.15 and (of_both < 0.09 if draws > 1 else of_both == of_images)


def test_holm_by_hand():
    """Sorted .005, .01, .03, .04 by 4, 3, 2, 1: .02, .03, .06, and .04, which may not be less."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.3, 0.6, 0.5]) == pytest.approx([0.9, 1.0, 1.0])
    assert (holm([0.2]), holm([])) == ([0.2], [])
    for wrong in (math.nan, -0.1, 1.1):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got"):
            holm([0.5, wrong])


def test_holm_makes_any_error_as_rare_as_one():
    """Of six dependent comparisons two differ; the error is to find another."""
    generator, times, level = np.random.default_rng(0), 4000, 0.05
    shared, own = generator.standard_normal((times, 1)), generator.standard_normal((times, 6))
    z = 0.4**0.5 * shared + 0.6**0.5 * own + np.array([0, 3, 0, 0, 4, 0])
    p = 2 * stats.norm.sf(abs(z))
    same = [0, 2, 3, 5]
    adjusted = np.array([holm(list(row)) for row in p])
    error = 3 * (level * (1 - level) / times) ** 0.5
    assert (p[:, same].min(1) < level).mean() > 2 * level
    assert (adjusted[:, same].min(1) < level).mean() < level + error
    bonferroni = 6 * p[:, [1, 4]] < level
    assert (adjusted[:, [1, 4]] < level).mean() > bonferroni.mean() > 0.5


def test_an_interval_over_draws_adds_the_half_widths_in_square():
    values, mean = [0.38, 0.4, 0.42], 0.4
    ends = zip(wilson_over_draws(values, 50), wilson(mean, 50), student(values), strict=True)
    for end, of_images, of_draws in ends:
        assert abs(end - mean) == pytest.approx(math.hypot(of_images - mean, of_draws - mean))
    assert wilson_over_draws([mean], 50) == wilson(mean, 50)
