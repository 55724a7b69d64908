"""Ranks of defenses with intervals, from the scores of some trainings on the same images."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau

from lightning_rob.comparisons import holm
from lightning_rob.metrics.intervals import Estimate, paired_p

LEVEL = 0.05
RESAMPLES = 1000
Array = NDArray[np.float64]


def difference(first: Array, second: Array) -> Estimate:
    """Estimate the mean difference of scores [trainings, N] on the same images.

    Both sources count: trainings vary, by themselves for each defense, and the images are a sample.
    Where nearly all images have the same difference the t test finds differences that do not exist,
    and `paired_p` decides.
    """
    of_images = first.mean(0) - second.mean(0)
    by_training = [group.mean(1) for group in (first, second) if len(group) > 1]
    parts = [part.tolist() for part in (of_images, *by_training)]
    exact = paired_p(*(torch.from_numpy(group.mean(0)) for group in (first, second)))
    return Estimate.of(float(of_images.mean()), parts, exact)


def ranks(scores: Sequence[Array]) -> list[tuple[int, int]]:
    """Return the best and the worst rank that each defense may have, of scores [trainings, N].

    A defense stands below those that are significantly better, and above those significantly worse,
    by its comparisons with all others, adjusted by Holm: for each defense by itself its true rank
    lies between both with a probability of 95 % or more. With one training of a defense, that is
    the rank of this training; with two, the interval misses more often where trainings differ much.
    """
    found = []
    for own, mine in enumerate(scores):
        others = [difference(score, mine) for place, score in enumerate(scores) if place != own]
        adjusted = holm([one.p for one in others])
        means = [one.mean for one, p in zip(others, adjusted, strict=True) if p < LEVEL]
        better, worse = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
        found.append((1 + better, len(scores) - worse))
    return found


def agreement(scores: Sequence[Array]) -> tuple[float, float, float]:
    """Return Kendall's tau between the orders by two trainings, and its 95 % interval.

    It is the mean over all pairs of trainings that all defenses with several have; the interval is
    of the bootstrap over defenses. NaN with fewer than three such defenses.
    """
    scores = [score for score in scores if len(score) > 1]
    common = min(map(len, scores), default=0)
    means = np.array([score[:common].mean(1) for score in scores])
    if len(means) < 3:
        return np.nan, np.nan, np.nan
    draws = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    # Defenses are drawn, not trainings: other defenses would have made another order.
    found = [float(np.mean([*_taus(means[chosen])])) for chosen in draws]
    low, high = np.nanquantile(found, [LEVEL / 2, 1 - LEVEL / 2])
    return float(np.mean([*_taus(means)])), float(low), float(high)


def _taus(means: Array) -> Iterator[float]:
    for first, second in combinations(means.T, 2):
        yield kendalltau(first, second).statistic
