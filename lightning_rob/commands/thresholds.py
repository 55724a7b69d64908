"""Limits of figures: least accuracies, most of `blind` and of findings."""

import math
from collections.abc import Mapping

from lightning_rob.comparisons import rounded_down

BLIND = "robust/blind"  # a share that must not rise above its value
FINDINGS = "robust/findings"  # their number, likewise


def parse_thresholds(text: str) -> dict[str, float]:
    """Return the limit of each figure by its name."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limit = float(value[:-1]) / 100 if value.endswith("%") else float(value)
        except ValueError:
            limit = math.nan  # which is in no range
        number = name.endswith("findings") and limit >= 0
        if not name or not (number or 0 <= limit <= 1):
            raise ValueError(
                f"a threshold is NAME=VALUE, from 0 to 1, such as robust/worst=0.40, got {part!r}"
            )
        limits[name] = limit
    return limits


def violations(limits: Mapping[str, float], logged: Mapping[str, float], stage: str) -> list[str]:
    """Describe each figure beyond its limit in one line: accuracies must not be below it.

    The name of an attack, or another one after "robust/", is enough: worst, pgd, blind.
    """
    lines = []
    for name, limit in limits.items():
        short = name.removeprefix(f"{stage}/")
        names = (f"{stage}/{short}", f"{stage}/robust/{short}")
        if not (key := next((key for key in names if key in logged), "")):
            known = sorted(k.removeprefix(f"{stage}/") for k in logged if k.startswith(stage))
            raise ValueError(f"no figure {name} was measured, only {', '.join(known) or 'none'}")
        if key.endswith(FINDINGS):
            if logged[key] > limit:
                lines.append(f"{name} is {logged[key]:g}, above {limit:g}")
        elif key.endswith(BLIND):
            if not rounded_down(logged[key]) <= limit:
                lines.append(f"{name} is {logged[key]:.2%}, above {100 * limit:g}%")
        elif not logged[key] >= rounded_down(limit):  # NaN violates a threshold, too
            digits = 2 if round(logged[key] - limit, 4) else 4  # enough to show the difference
            lines.append(f"{name} is {logged[key]:.{digits}%}, below {100 * limit:g}%")
    return lines
