"""How far a measured figure may be from the truth."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def wilson(mean: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """The score interval of a mean of n numbers in [0, 1] (Wilson 1927).

    Exact in spirit for 0/1 answers; for a randomized ensemble's expected accuracies, which vary
    less than 0/1 answers of the same mean, it is too wide rather than too narrow.

    Args:
        mean: the observed mean.
        n: how many images it is the mean of.
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


def student(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The t interval of the mean of independent numbers: repeats, seeds, paired differences.

    Args:
        values: at least two numbers.
        level: the probability that the interval covers the truth.

    Returns:
        (low, high).
    """
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
