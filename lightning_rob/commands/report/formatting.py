"""Numbers and names as they appear on the page."""

import math
from collections.abc import Sequence

from lightning_rob.commands.report.blocks import Cell

NONE = "\N{EN DASH}"
WHOLE = "full_defense"  # the target that is the complete defense
WORST = ("worst", WHOLE)
Interval = Sequence[float] | None  # two shares; None where they are not known


def percent(share: float | None) -> str:
    """Return a share with one digit after the point; a dash where it is not known."""
    return NONE if share is None or not math.isfinite(share) else f"{share:.1%}"


def between(interval: Interval) -> str:
    """Return an interval; an empty text where it is unknown."""
    return f"{interval[0]:.1%} … {interval[1]:.1%}" if interval else ""


def accuracy_cell(share: float | None, interval: Interval = None, shaded: bool = False) -> Cell:
    """Return an accuracy above its interval, shaded by it where it is known."""
    known = share is not None and math.isfinite(share)
    return Cell(percent(share), between(interval), shade=share if shaded and known else None)


def line_name(key: tuple[str, str]) -> str:
    """Return the attack, and its target unless that is the whole defense."""
    return key[0] if key[1] == WHOLE else f"{key[0]} on {key[1].replace('_', ' ')}"


def listed(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def extent(counts: Sequence[int]) -> str:
    """Return one count, or the smallest and the largest."""
    return " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})) if counts else ""


def split_of(stage: str) -> str:
    """Return the split that a stage evaluates."""
    return {"val": "validation"}.get(stage, stage)
