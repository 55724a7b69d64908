"""Figures that must not fall below a value: "robust/worst=0.40,robust/arc=0.35"."""

import math
from collections.abc import Mapping


def thresholds(text: str) -> dict[str, float]:
    """The least accuracy by figure.

    Args:
        text: NAME=VALUE, several with commas between them; a value is in [0, 1] or like "40%".

    Raises:
        ValueError: it reads otherwise.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        least = _share(value)
        if not name or not 0 <= least <= 1:
            raise ValueError(f"a threshold is NAME=VALUE, such as robust/worst=0.40, got {part!r}")
        found[name] = least
    return found


def _share(value: str) -> float:
    try:
        return float(value[:-1]) / 100 if value.endswith("%") else float(value)
    except ValueError:
        return math.nan


def fallen(least: Mapping[str, float], figures: Mapping[str, float], stage: str) -> list[str]:
    """What is below its threshold, a line each.

    Args:
        least: accuracy by figure, with or without the stage before its name.
        figures: what was logged.
        stage: "test" or "val".

    Raises:
        ValueError: a figure was not measured.
    """
    lines = []
    for name, value in least.items():
        key = name if name.startswith(f"{stage}/") else f"{stage}/{name}"
        if key not in figures:
            there = sorted(k.removeprefix(f"{stage}/") for k in figures if k.startswith(stage))
            raise ValueError(f"no figure {name} was measured, only {', '.join(there) or 'none'}")
        if not figures[key] >= value:  # what is not a number has failed, too
            lines.append(f"{name} is {figures[key]:.4f}, below {value:g}")
    return lines
