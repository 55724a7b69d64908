"""Many comparisons at once; plain Python, so that reports need not load torch."""

from collections.abc import Sequence


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p of several comparisons, so that any error among them is as rare as one alone.

    Step-down (Holm 1979): the smallest of k counts k times, the next k - 1 times, and so on.
    Comparisons whose adjusted p is at most a level hold no false one with a probability of
    at least one minus that level, however they depend on each other.

    Args:
        p: of each comparison.

    Returns:
        The adjusted p of each, in the same order, at most 1.

    Raises:
        ValueError: a p outside [0, 1].
    """
    if odd := [value for value in p if not 0 <= value <= 1]:
        raise ValueError(f"p must be in [0, 1], got {odd[0]}")
    adjusted, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted
