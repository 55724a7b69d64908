"""Limits of figures: accuracies not below a value, `blind` and the number of findings not above."""

import math
from collections.abc import Mapping

from lightning_rob.comparisons import rounded_down

BLIND = "robust/blind"  # also as "blind": a share that must not rise above its value
FINDINGS = "robust/findings"  # their number, likewise


def parse_thresholds(text: str) -> dict[str, float]:
    """Return the minimum accuracy by metric name; the maximum of `blind`."""
    minima = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            minimum = float(value[:-1]) / 100 if value.endswith("%") else float(value)
        except ValueError:
            minimum = math.nan  # which is in no range
        if not name or not 0 <= minimum <= 1:
            raise ValueError(
                f"a threshold is NAME=VALUE, from 0 to 1, such as robust/worst=0.40, got {part!r}"
            )
        minima[name] = minimum
    return minima


def violations(minima: Mapping[str, float], logged: Mapping[str, float], stage: str) -> list[str]:
    """Describe each metric below its threshold, or `blind` above it, in one line."""
    lines = []
    for name, minimum in minima.items():
        short = name.removeprefix(f"{stage}/")
        key = f"{stage}/{BLIND if short == 'blind' else short}"
        if key not in logged:
            known = sorted(k.removeprefix(f"{stage}/") for k in logged if k.startswith(stage))
            raise ValueError(f"no figure {name} was measured, only {', '.join(known) or 'none'}")
        if key.endswith(FINDINGS):
            if logged[key] > minimum:
                lines.append(f"{name} is {logged[key]:g}, above {minimum:g}")
        elif key.endswith(BLIND):
            if not rounded_down(logged[key]) <= minimum:
                lines.append(f"{name} is {logged[key]:.2%}, above {100 * minimum:g}%")
        elif not logged[key] >= rounded_down(minimum):  # NaN violates a threshold, too
            digits = 2 if round(logged[key] - minimum, 4) else 4  # enough to show the difference
            lines.append(f"{name} is {logged[key]:.{digits}%}, below {100 * minimum:g}%")
    return lines
