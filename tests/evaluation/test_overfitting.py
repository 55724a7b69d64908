"""The verdict on robust overfitting: by hand, and how often equal networks raise a false alarm."""

import numpy as np
import torch

from lightning_rob.evaluation import Overfitting
from lightning_rob.evaluation.overfitting import EpochScores, better
from lightning_rob.metrics import paired
from lightning_rob.metrics.gaffke import mean_interval
from tests.schema import SCHEMA, problems


def verdict(val):
    best = ()
    for epoch, scores in enumerate(val):
        last = EpochScores(epoch, 0, scores)
        best = better(best, last)
    return Overfitting.of(best, last)


def rows(*shares, n=400):
    """Scores of networks that are right on the first images, in an order common to all."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return [(order < share * n).float() for share in shares]


def test_each_half_is_compared_with_the_epoch_that_the_other_chose():
    val = torch.zeros(3, 8)
    val[0, ::2] = 1  # the best by even images
    val[1, 1::2] = 1  # the best by odd ones
    val[2, :4] = 1
    found = verdict(val)
    assert found.best == (0, 1)
    gaps = np.zeros(8)
    gaps[1::2] = val[2, 1::2] - val[0, 1::2]
    gaps[0::2] = val[2, 0::2] - val[1, 0::2]
    assert found.val == (0.5, *mean_interval(gaps, 0.98))


def test_what_is_said():
    fell, level, rose = (verdict(rows(0.4, 0.6, last)) for last in (0.45, 0.59, 0.7))
    assert [one.found for one in (fell, level, rose)] == [True, False, False]
    assert str(fell).startswith("robust accuracy fell: from epoch 1 to 2 -15.")
    assert str(level).startswith("no robust overfitting is seen")
    assert str(rose) == "no robust overfitting: the last measured epoch, 2, is the best"
    for one in (fell, level, rose):
        assert not [*problems(one.record() | {"name": "val/robust/worst"}, SCHEMA)]


def test_equal_networks_raise_few_false_alarms():
    """30 epochs of equal networks, 200 images: the best epoch against the last one on the same
    images is a false alarm in more than a tenth of fits, the verdict in at most a fortieth."""
    rng, naive, ours, fits = np.random.default_rng(0), 0, 0, 80
    for _ in range(fits):
        easy = rng.standard_normal(200)
        val = torch.tensor(0.84 * easy + 0.55 * rng.standard_normal((30, 200)) < 0).float()
        best = val[val.mean(1).argmax()]
        naive += paired(best, val[-1]).interval[1] < 0
        ours += verdict(val).val.high < 0
    assert naive > fits / 10
    assert ours <= fits / 40
