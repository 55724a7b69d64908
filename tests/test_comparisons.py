"""Paired comparisons and their adjustment."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from lightning_rob.metrics import clopper_pearson, holm, mcnemar, paired, wilson


def bits(text):
    return torch.tensor([float(c) for c in text])


def test_mcnemar_by_hand():
    before, after = bits("1111100000"), bits("0000010000")  # 5 lost, 1 won
    expected = 2 * sum(math.comb(6, k) for k in (0, 1)) / 2**6
    assert mcnemar(before, after) == pytest.approx(expected)
    assert mcnemar(after, before) == pytest.approx(expected)
    assert mcnemar(before, before) == 1.0


def test_which_test_depends_on_the_answers():
    certain = paired(bits("11110"), bits("10010"))
    assert (certain.test, certain.difference) == ("McNemar", pytest.approx(-0.4))
    assert certain.p == pytest.approx(0.5)
    one, other = torch.tensor([0.5, 1.0, 0.5, 0.2]), torch.tensor([0.4, 0.8, 0.4, 0.0])
    expected = paired(one, other)
    assert (expected.test, expected.difference) == ("sign flips", pytest.approx(-0.15))
    many = paired(one.repeat(5), other.repeat(5))
    assert (many.test, many.difference) == ("paired t", pytest.approx(-0.15))
    assert many.p < 1e-6
    assert expected.p == pytest.approx(2 / 2**4)
    assert paired(one, one).p == 1.0
    assert paired(one[:1], other[:1]).p == 1.0
    assert paired(bits("11"), torch.tensor([0.5, 0.5])).p == pytest.approx(0.5)
    with pytest.raises(ValueError, match="not numbers"):
        paired(one, other * math.nan)


def test_p_decides_where_the_interval_disagrees():
    """Five images lost of five: the t interval has no width, McNemar's p is 2 / 2**5."""
    few = paired(torch.ones(5), torch.zeros(5))
    assert few.interval == (-1.0, -1.0)
    assert not few.significant
    assert str(few).endswith("p = 0.062 (McNemar): not significant, p decides")
    assert paired(torch.ones(6), torch.zeros(6)).significant


def test_scores_of_other_images_are_refused():
    with pytest.raises(ValueError, match="3 scores cannot be paired with 2"):
        paired(torch.zeros(3), torch.zeros(2))


def test_holm_by_hand():
    """Sorted .005, .01, .03, .04 by 4, 3, 2, 1: .02, .03, .06, and .04, which may not be less."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.3, 0.6, 0.5]) == pytest.approx([0.9, 1.0, 1.0])
    assert (holm([0.2]), holm([])) == ([0.2], [])
    for wrong in (math.nan, -0.1, 1.1):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got"):
            holm([0.5, wrong])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_p_and_bonferroni_and_keeps_the_order(p):
    adjusted = holm(p)
    assert all(a <= b <= min(1, len(p) * a) for a, b in zip(p, adjusted, strict=True))
    order = sorted(range(len(p)), key=p.__getitem__)
    assert all(adjusted[i] <= adjusted[j] for i, j in pairwise(order))
    assert len({(a, b) for a, b in zip(p, adjusted, strict=True)}) == len(set(p))


def test_holm_makes_any_error_as_rare_as_one():
    """Of six dependent comparisons two differ; the error is to find another."""
    chance, times, level = np.random.default_rng(0), 4000, 0.05
    shared, own = chance.standard_normal((times, 1)), chance.standard_normal((times, 6))
    z = 0.4**0.5 * shared + 0.6**0.5 * own + np.array([0, 3, 0, 0, 4, 0])
    p = 2 * norm.sf(abs(z))
    same = [0, 2, 3, 5]
    adjusted = np.array([holm(list(row)) for row in p])
    error = 3 * (level * (1 - level) / times) ** 0.5
    assert (p[:, same].min(1) < level).mean() > 2 * level
    assert (adjusted[:, same].min(1) < level).mean() < level + error
    bonferroni = 6 * p[:, [1, 4]] < level
    assert (adjusted[:, [1, 4]] < level).mean() > bonferroni.mean() > 0.5


def test_clopper_pearson_holds_wilson_and_known_values():
    low, high = clopper_pearson(7, 20)
    assert (low, high) == pytest.approx((0.1539, 0.5922), abs=1e-4)
    assert clopper_pearson(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    for k in range(21):
        inner, outer = wilson(k / 20, 20), clopper_pearson(k, 20)
        assert outer[1] - outer[0] > 0.99 * (inner[1] - inner[0])
