"""Mean of bounded numbers: a test and an interval that hold for few and for skewed numbers."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SMALLEST = 1e-300  # below it rounding decides; a p-value is never 0

# Nodes and weights on (0, inf) of an integrand that falls off like a Gaussian, or for few numbers
# only like a power: t = sinh(pi / 2 sinh(u)) with equal steps in u (Takahasi and Mori 1974).
_U = np.linspace(0.0, 3.4, 401)  # of thousands of numbers it oscillates
_NODES = np.sinh(np.pi / 2 * np.sinh(_U))
_WEIGHTS = np.cosh(np.pi / 2 * np.sinh(_U)) * np.pi / 2 * np.cosh(_U) * (_U[1] - _U[0])
_WEIGHTS[0] /= 2
_BLOCK = 80  # nodes; later blocks are left out where they add nothing


def p_at_most(values: Floats, mean: float = 0.0) -> float:
    """Compute the p-value of the hypothesis that numbers in [-1, 1] have at most a given mean.

    The numbers, and -1 once more for what was not drawn, get random weights, uniform among all
    that sum to one; p is the probability that their weighted mean is at most the given one
    (Gaffke 2005; Learned-Miller and Thomas 2019). For numbers in {-1, 0, 1} and mean 0 it is the
    exact one-sided p of McNemar's test, and of two values alone the interval is Clopper and
    Pearson's. That p holds for all bounded numbers and any n is a conjecture to which no
    counterexample is known.
    """
    weights, counts = np.unique(np.append(values, -1.0) - mean, return_counts=True)
    # Where p is large its complement is computed, for small probabilities are precise.
    if (weights * counts).sum() <= 0:
        return max(1 - _below_zero(-weights, counts), SMALLEST)
    return min(1.0, max(_below_zero(weights, counts), SMALLEST))


def mean_interval(values: Floats, level: float = 0.95) -> tuple[float, float]:
    """Compute the interval of the mean of numbers [N] in [-1, 1]: all that `p_at_most` leaves."""
    from scipy.optimize import brentq

    alpha = (1 - level) / 2

    def lower_end(values: Floats) -> float:
        if not (values > -1).any():
            return -1.0
        high = float(values.mean())
        return float(brentq(lambda m: math.log(p_at_most(values, m) / alpha), -1, high, xtol=1e-8))

    return lower_end(values), -lower_end(-values)


def _below_zero(weights: Floats, counts: NDArray[np.int64]) -> float:
    """Compute the probability that a weighted sum of exponential variables is at most 0."""
    # Of the variables, counts [K] have one of the different weights [K].
    weights, counts = weights[weights != 0], counts[weights != 0]
    if not (weights > 0).any():
        return 1.0
    if not (weights < 0).any():
        return 0.0
    # The exponent is convex between 0 and the pole of the smallest weight: bisect its slope.
    low, high = 0.0, -1 / float(weights.min())
    for _ in range(50):
        saddle = (low + high) / 2
        rises = (counts * weights / (1 + saddle * weights)).sum() + 1 / saddle < 0
        low, high = (low, saddle) if rises else (saddle, high)
    # The probability is the integral of the moment generating function over a line in the complex
    # plane. Through the saddle point nothing cancels: the smallest one is as exact as 0.5.
    slopes = weights / (1 + saddle * weights)
    width = 1 / math.sqrt((counts * slopes**2).sum() + 1 / saddle**2)
    total = 0.0
    for start in range(0, len(_NODES), _BLOCK):
        t = width * _NODES[start : start + _BLOCK]
        by_weight = slopes[:, None] * t
        size = np.exp(-(counts @ np.log1p(by_weight**2) + np.log1p((t / saddle) ** 2)) / 2)
        angle = counts @ np.arctan(by_weight) + np.arctan(t / saddle)
        size = width * size * _WEIGHTS[start : start + _BLOCK]
        total += float((size * np.cos(angle)).sum())
        if size.max() < 1e-16 * abs(total):
            break
    height = -float((counts * np.log1p(saddle * weights)).sum()) - math.log(saddle)
    return total * math.exp(height) / math.pi
