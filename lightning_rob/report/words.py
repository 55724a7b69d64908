"""Numbers as they are written on the page."""

import math
from collections.abc import Sequence

from lightning_rob.report.records import WHOLE, Record

NONE = "\N{EN DASH}"


def percent(share: float) -> str:
    """A share with one digit after the point."""
    return f"{share:.1%}" if math.isfinite(share) else NONE


def between(record: Record) -> str:
    """The interval of a record."""
    if record.interval is None or not math.isfinite(record.accuracy):
        return ""
    return f"{record.interval[0]:.1%} … {record.interval[1]:.1%}"


def images(n: int) -> str:
    """A count with commas."""
    return f"{n:,}"


def target(name: str) -> str:
    """What was attacked, in words."""
    return name.replace("_", " ")


def line_name(key: tuple[str, str]) -> str:
    """The attack, and its target where that is not the whole defense."""
    return key[0] if key[1] == WHOLE else f"{key[0]} on {target(key[1])}"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def extent(counts: Sequence[int]) -> str:
    """One count, or the least and the most."""
    return " to ".join(images(n) for n in sorted({min(counts), max(counts)})) if counts else ""


def split_of(stage: str) -> str:
    """The images of a stage, in words."""
    return {"val": "validation", "test": "test"}.get(stage, stage)
