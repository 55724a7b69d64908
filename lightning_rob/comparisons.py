"""Limits and corrections for several comparisons, in plain Python: reports need no torch."""

from collections.abc import Sequence

SIGNIFICANT = 0.05  # p below which a difference is significant
ROUNDING = 1e-6  # a mean of float32 scores may miss its exact value by about 1e-7


def rounded_down(limit: float) -> float:
    """Return the least accuracy that counts as a limit reached: the limit but for rounding."""
    return limit - ROUNDING


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values of several comparisons to bound the probability of any false one.

    Step-down (Holm 1979): the smallest of k is multiplied by k, the next by k - 1, and so on.
    Among the comparisons whose adjusted p is at most a level, the probability of any false one is
    at most that level, for any dependence between them.
    """
    if odd := [value for value in p if not 0 <= value <= 1]:
        raise ValueError(f"p must be in [0, 1], got {odd[0]}")
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted
