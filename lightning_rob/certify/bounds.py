"""Lower bounds of a probability from votes that are looked at while they come in."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri

Floats = NDArray[np.float64]
FEWEST = 50  # draws before the first look
ROUNDING = 2.0**-30  # relative, of quantiles and radii: far above their error in double precision


def lower_bound(right: Floats, draws: int, failure: float) -> Floats:
    """Compute the one-sided lower bound of Clopper and Pearson (1934) from `right` of `draws`."""
    k = np.maximum(right, 1)
    bound = betaincinv(k, draws - k + 1, failure)
    return np.where(right > 0, bound * (1 - ROUNDING), 0.0)


@dataclass(frozen=True)
class Looks:
    """When to look at the votes, and how much of the failure probability each look may spend.

    Whichever look is used, and whatever decides to stop, some bound is above the truth with a
    probability of at most `failure`.
    """

    draws: int  # n, of the last look
    failure: float  # the probability with which some bound may be above the truth
    early: bool = True  # look before the last draw

    @property
    def schedule(self) -> list[tuple[int, float]]:
        """The number of draws of each look, rising, and the failure probability it spends."""
        # A bound that is computed after each look and kept where it is good fails more often than
        # one that is computed once. The looks therefore share the failure probability, a union
        # bound over a schedule that is fixed before: half is the last look's, which hard images
        # need, and the looks before, each after half as many draws, share the rest.
        counts = [self.draws]
        while self.early and counts[0] // 2 >= FEWEST:
            counts = [counts[0] // 2, *counts]
        if len(counts) == 1:
            return [(self.draws, self.failure)]
        share = self.failure / 2
        return [*((n, share / (len(counts) - 1)) for n in counts[:-1]), (self.draws, share)]

    def undecided(
        self, right: Floats, draws: int, lower: Floats, wanted: Floats
    ) -> NDArray[np.bool_]:
        """Return which images [B] more draws can help beyond one of the wanted bounds [R].

        Of the draws so far `right` [B] were for the chosen class, with `lower` [B] the best bound.
        """
        best = lower_bound(right + self.draws - draws, self.draws, self.schedule[-1][1])
        # Giving up too early costs power alone, not soundness.
        hopeless = 1 - lower_bound(draws - right, draws, self.failure)
        reach = np.minimum(best, hopeless)[:, None]
        return np.asarray(((lower[:, None] < wanted) & (wanted < reach)).any(1))


def radius_of(probability: Floats, sigma: float) -> Floats:
    """Compute sigma times the normal quantile, rounded down; 0 below a probability of 1/2."""
    inside = np.maximum(probability, 0.5)
    return np.asarray(sigma * ndtri(inside) * (1 - ROUNDING))


def probability_for(radii: Floats, sigma: float) -> Floats:
    """Compute the bound of the probability that certifies these radii, rounded up."""
    return np.asarray(ndtr(radii / sigma * (1 + 4 * ROUNDING)) * (1 + 4 * ROUNDING))
