"""Confidence intervals of accuracies, and tests of their differences."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev, variance

import numpy as np
from torch import Tensor

from lightning_rob.comparisons import SIGNIFICANT, rounded_down
from lightning_rob.metrics.gaffke import SMALLEST, Floats, mean_interval, p_at_most


def wilson(mean: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the score interval of a mean of n numbers in [0, 1] (Wilson 1927).

    It covers the truth with a probability of about `level`, and near 0 and 1 of less: of 0/1 scores
    with 0.84 for n = 10 and 0.91 for n = 100; `clopper_pearson` always does. For the expected
    accuracies of a randomized ensemble, which vary less than 0/1 scores of the same mean, it is too
    wide rather than too narrow.
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

    It covers the truth with probability `level` at least.
    """
    from scipy.stats import binomtest

    if n < 1:
        return 0.0, 1.0
    interval = binomtest(successes, n).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)


def student(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Compute the t interval of the mean of two independent numbers or more, such as repeats."""
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def wilson_over_draws(values: Sequence[float], n: int, level: float = 0.95) -> tuple[float, float]:
    """Compute the interval of a mean over images and over draws that all images share.

    Such draws are a defender's private randomness or the members of an ensemble.

    Args:
        values: accuracy of the same n images by draw; of a single draw the interval is Wilson's.
    """
    mean = fmean(values)
    low, high = wilson(mean, n, level)
    if len(values) > 1:
        # Images and draws are assumed to be independent: the half widths add in square.
        t_low, t_high = student(values, level)
        low = max(0.0, mean - math.hypot(mean - low, mean - t_low))
        high = min(1.0, mean + math.hypot(high - mean, t_high - mean))
    return low, high


@dataclass(frozen=True)
class Paired:
    """The difference of two scores of the same images."""

    difference: float  # the second's mean minus the first's
    interval: tuple[float, float]  # of 95 %; it leaves out 0 exactly if p is below 0.05
    p: float  # the two-sided p-value of no difference
    test: str  # the name of the test that gave both

    @property
    def significant(self) -> bool:
        """Whether p is below 0.05."""
        return self.p < SIGNIFICANT

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{100 * self.difference:+.1f} points (95 % interval {100 * low:.1f} … "
            f"{100 * high:.1f}), p = {self.p:.2g} ({self.test}): "
            f"{'' if self.significant else 'not '}significant"
        )


def mcnemar(first: Tensor, second: Tensor) -> float:
    """Compute the exact two-sided p-value of scores [N] of the same images (McNemar 1947).

    Scores are correct from 0.5 on. It is the probability that the images that are correct under one
    of the two split at least as unevenly.
    """
    from scipy.stats import binomtest

    one, other = first >= rounded_down(0.5), second >= rounded_down(0.5)
    lost, won = int((one & ~other).sum()), int((other & ~one).sum())
    return max(float(binomtest(won, won + lost).pvalue), SMALLEST) if won + lost else 1.0


def paired(first: Tensor, second: Tensor) -> Paired:
    """Compare two scores [N] in [0, 1] of the same images: attacks or checkpoints.

    The test is `gaffke.p_at_most` of the differences, on both sides: it holds for any scores in
    [0, 1], however few or skewed. Where all scores are 0 or 1 it is McNemar's exact test.
    """
    gaps = _gaps(first, second)
    difference = float(gaps.mean()) if len(gaps) else 0.0
    p = paired_p(first, second)
    certain = not ((first % 1).any() or (second % 1).any())
    return Paired(difference, mean_interval(gaps), p, "McNemar" if certain else "Gaffke")


def paired_over_draws(first: Tensor, second: Tensor) -> Paired:
    """Compare two scores [N, R] of the same images under R draws that all images share.

    Such draws are a defender's private randomness. Differences vary with the images and with the
    draws: the test is a t test with the sum of both variances, where `paired` of the means over
    draws is not less significant. With one draw, or with other draws of each score, it is `paired`,
    which leaves the draws out.
    """
    found = paired(first.mean(1), second.mean(1))
    if first.shape != second.shape or min(first.shape) < 2:
        return found
    gaps = (second - first).double()
    mean = Estimate.of(found.difference, [gaps.mean(1).tolist(), gaps.mean(0).tolist()], found.p)
    half, (low, high) = mean.half, found.interval
    interval = min(low, found.difference - half), max(high, found.difference + half)
    return replace(found, interval=interval, p=mean.p, test=f"{found.test} and t over draws")


@dataclass(frozen=True)
class Estimate:
    """A mean that varies for several reasons, with its standard error and degrees of freedom."""

    mean: float
    error: float
    freedom: float
    exact: float  # the p-value of the mean 0 over images alone, which holds for few and for skewed

    @classmethod
    def of(cls, mean: float, parts: Iterable[Sequence[float]], exact: float) -> "Estimate":
        """Return it for the values by each reason, two or more, which are independent of others.

        Variances add up; the degrees of freedom are those of Welch and Satterthwaite.
        """
        squares = [(variance(part) / len(part), len(part) - 1) for part in parts]
        total = sum(square for square, _ in squares)
        spread = sum(square**2 / freedom for square, freedom in squares)
        freedom = total**2 / spread if spread > 0 else math.inf
        return cls(mean, math.sqrt(total), freedom, exact)

    @property
    def p(self) -> float:
        """The p-value of the mean 0, on both sides: the larger of the exact and the t test's."""
        from scipy.stats import t

        if self.error == 0:
            return self.exact
        return max(self.exact, float(2 * t.sf(abs(self.mean) / self.error, self.freedom)))

    @property
    def half(self) -> float:
        """Half of the 95 % t interval."""
        from scipy.stats import t

        return float(t.ppf(0.975, self.freedom)) * self.error


def paired_p(first: Tensor, second: Tensor) -> float:
    """Compute the two-sided p-value of `paired` alone, which is fast."""
    gaps = _gaps(first, second)
    return min(1.0, 2 * p_at_most(gaps), 2 * p_at_most(-gaps))


def _gaps(first: Tensor, second: Tensor) -> Floats:
    """Return the second scores minus the first, [N] in [-1, 1]."""
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    # Sums of float32 probabilities may exceed 1 by rounding.
    gaps = (second.double() - first.double()).clamp(-1, 1)
    if gaps.isnan().any():
        raise ValueError("scores that are not numbers cannot be compared")
    return np.asarray(gaps.cpu().numpy())
