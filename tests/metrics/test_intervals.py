"""Intervals against scipy's, and their coverage in simulation."""

import numpy as np
import pytest
from scipy import stats

from lightning_rob.metrics import student, wilson


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 50), (50, 50), (7, 10), (123, 1000)])
def test_wilson_is_scipys(right, n, level):
    expected = stats.binomtest(right, n).proportion_ci(level, "wilson")
    low, high = wilson(right / n, n, level)
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)


@pytest.mark.parametrize("mean", [0.0, 1.0, 0.3, 1 + 2e-7, -1e-9])
@pytest.mark.parametrize("n", [1, 100, 50_000])
def test_wilson_stays_a_proportion(mean, n):
    """Also where the mean of float32 scores came out a little above one."""
    low, high = wilson(mean, n)
    assert 0 <= low <= high <= 1
    assert low - 1e-6 <= mean <= high + 1e-6


def test_wilson_never_rounds_out_of_the_proportions():
    assert min(wilson(0.0, n)[0] for n in range(1, 2000)) == 0
    assert max(wilson(1.0, n)[1] for n in range(1, 2000)) == 1


def test_wilson_of_nothing():
    assert wilson(0.5, 0) == (0.0, 1.0)
    assert wilson(float("nan"), 0) == (0.0, 1.0)


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.5, 0.95])
def test_wilson_covers_the_truth(truth):
    """Coverage of the 95 % interval: exact, over the distribution of the number right."""
    n = 200
    weights = stats.binom.pmf(np.arange(n + 1), n, truth)
    inside = [low <= truth <= high for low, high in (wilson(k / n, n) for k in range(n + 1))]
    assert 0.92 < weights[inside].sum() < 0.98


def test_wilson_covers_in_simulation():
    draws = np.random.default_rng(0).binomial(100, 0.8, 2000)
    inside = [low <= 0.8 <= high for low, high in (wilson(k / 100, 100) for k in draws)]
    assert 0.93 < np.mean(inside) < 0.975


def test_wilson_is_wide_enough_for_expected_accuracies():
    """Scores of 0, 0.1, 0.9 and 1 vary less than scores of 0 and 1 with the same mean."""
    scores = np.random.default_rng(1).choice([0, 0.1, 0.9, 1], (2000, 100), p=[0.2, 0.3, 0.3, 0.2])
    inside = [low <= 0.5 <= high for low, high in (wilson(m, 100) for m in scores.mean(1))]
    assert np.mean(inside) > 0.95


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("values", [[0.4, 0.5], [0.1, 0.2, 0.35, 0.1], list(range(30))])
def test_student_is_scipys(values, level):
    expected = stats.t.interval(
        level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )
    assert student(values, level) == pytest.approx(expected, abs=1e-12)


def test_student_of_equal_numbers():
    assert student([0.25, 0.25, 0.25]) == (0.25, 0.25)


def test_student_covers_in_simulation():
    samples = np.random.default_rng(2).normal(3.0, 2.0, (1500, 5))
    inside = [low <= 3 <= high for low, high in (student(list(s)) for s in samples)]
    assert 0.935 < np.mean(inside) < 0.965


def test_student_needs_two_numbers():
    with pytest.raises(ValueError, match="two"):
        student([0.5])
