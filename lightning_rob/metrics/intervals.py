"""Confidence intervals of accuracies, and tests of their differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from torch import Tensor

from lightning_rob.comparisons import P_DECIDES, SIGNIFICANT

FEW = 12  # images whose 2^12 patterns of signs are all tried


def wilson(mean: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the score interval of a mean of n numbers in [0, 1] (Wilson 1927).

    It is derived for 0/1 scores; for a randomized ensemble's expected accuracies, which vary less
    than 0/1 scores of the same mean, it is too wide rather than too narrow.

    Args:
        mean: the observed mean.
        n: number of images.
        level: the probability that the interval covers the truth.

    Returns:
        (low, high).
    """
    if n < 1:
        return 0.0, 1.0
    mean = min(max(mean, 0.0), 1.0)  # a sum of probabilities may miss 1 by rounding
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the exact interval of a proportion (Clopper and Pearson 1934); wider than `wilson`.

    Args:
        successes: number of correct predictions.
        n: number of images.
        level: lower bound of the probability that the interval covers the truth.

    Returns:
        (low, high).

    Raises:
        ValueError: more successes than images.
    """
    from scipy.stats import binomtest

    if n < 1:
        return 0.0, 1.0
    interval = binomtest(successes, n).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)


def student(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Compute the t interval of the mean of independent numbers, such as repeats or seeds.

    Args:
        values: at least two numbers.
        level: the probability that the interval covers the truth.

    Returns:
        (low, high).
    """
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def wilson_over_draws(values: Sequence[float], n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the interval of a mean over images and over draws that all images share.

    Such draws are a defender's private randomness or the members of an ensemble. Both sources of
    randomness are assumed to be independent: the half widths of `wilson` and `student` add in
    square.

    Args:
        values: accuracy of the same n images by draw; of a single draw the interval is Wilson's.
        n: number of images.
        level: the probability that the interval covers the truth.

    Returns:
        (low, high).
    """
    mean = fmean(values)
    low, high = wilson(mean, n, level)
    if len(values) > 1:
        t_low, t_high = student(values, level)
        low = max(0.0, mean - math.hypot(mean - low, mean - t_low))
        high = min(1.0, mean + math.hypot(high - mean, t_high - mean))
    return low, high


@dataclass(frozen=True)
class Paired:
    """The difference of two scores of the same images.

    The p-value decides whether the difference is significant. The interval says how large it may
    be; it comes from the t distribution, which is approximate for 0/1 scores, so near the limit,
    or of few images, it may leave out 0 where the exact p-value finds nothing, or the reverse.

    Args:
        difference: the second's mean minus the first's.
        interval: its 95 % t interval; (-1, 1) for fewer than two images.
        p: the probability of a difference at least as large under the null hypothesis.
        test: name of the test that gave p.
    """

    difference: float
    interval: tuple[float, float]
    p: float
    test: str

    @property
    def significant(self) -> bool:
        """Whether p is below 0.05."""
        return self.p < SIGNIFICANT

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{100 * self.difference:+.1f} points (95 % interval {100 * low:.1f} … "
            f"{100 * high:.1f}, paired t), p = {self.p:.2g} ({self.test}): "
            f"{'' if self.significant else 'not '}significant, {P_DECIDES}"
        )


def mcnemar(first: Tensor, second: Tensor) -> float:
    """Compute the exact two-sided p-value of predictions of the same images (McNemar 1947).

    Args:
        first: [N] scores, correct from 0.5 on.
        second: [N] scores of the same images.

    Returns:
        The probability that the images correct under one of the two split at least as unevenly.
    """
    from scipy.stats import binomtest

    one, other = first >= 0.5, second >= 0.5
    lost, won = int((one & ~other).sum()), int((other & ~one).sum())
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def paired(first: Tensor, second: Tensor) -> Paired:
    """Compare two scores of the same images: attacks or checkpoints.

    The test is McNemar's if all scores are 0 or 1, else (expected accuracies of a randomized
    ensemble) the t test of the differences; for at most 12 images their signs are flipped.

    Args:
        first: [N] in [0, 1].
        second: [N] of the same images.

    Raises:
        ValueError: different numbers of scores, or a score is NaN.
    """
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    gaps = (second - first).double()
    if gaps.isnan().any():
        raise ValueError("scores that are not numbers cannot be compared")
    if len(gaps) < 2:
        return Paired(float(gaps.sum()), (-1.0, 1.0), 1.0, "too few images")
    if not ((first % 1).any() or (second % 1).any()):
        p, test = mcnemar(first, second), "McNemar"
    elif len(gaps) <= FEW:
        p, test = _sign_flips(gaps), "sign flips"
    else:
        p, test = _paired_t(gaps), "paired t"
    return Paired(float(gaps.mean()), student(gaps.tolist()), p, test)


def _sign_flips(gaps: Tensor) -> float:
    """Compute the exact p-value of a mean difference under all patterns of signs."""
    from scipy.stats import permutation_test

    result = permutation_test(
        (gaps.numpy(),),
        lambda g, axis: g.mean(axis),
        vectorized=True,
        permutation_type="samples",
        n_resamples=2**FEW + 1,
    )
    return float(result.pvalue)


def _paired_t(gaps: Tensor) -> float:
    """Compute the two-sided p-value of a mean difference by the t test."""
    from scipy.stats import t

    error = float(gaps.std()) / math.sqrt(len(gaps))
    if not error:  # all differences are equal
        return float(gaps[0] == 0)
    return 2 * float(t.sf(abs(float(gaps.mean())) / error, len(gaps) - 1))
