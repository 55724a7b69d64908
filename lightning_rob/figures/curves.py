"""Accuracy by a variable, one line per attack with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_rob.figures.page import COLORS, MARKERS, blank

SHORT_LONG = (0, (3, 1.5, 1, 1.5, 1, 1.5))
DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.4)), (0, (5, 1.5)), SHORT_LONG)
WIDE = 20  # largest over smallest value from which the axis is logarithmic
COLUMNS = 2  # of the legend
MANY = 12  # values from which not every one is a tick


@dataclass(frozen=True)
class Curve:
    """One line.

    Args:
        label: in the legend.
        x: [N] where it was measured.
        accuracy: [N] in [0, 1].
        intervals: [N] (low, high) of each.
        color: None takes the next of `COLORS`.
    """

    label: str
    x: Sequence[float]
    accuracy: Sequence[float]
    intervals: Sequence[tuple[float, float]]
    color: str | None = None


def curves(lines: Sequence[Curve], x_label: str, y_label: str) -> Figure:
    """Draw accuracies in per cent, each line with a band of its intervals.

    Lines differ by colour, marker and dashes: they can be told apart in grey.

    Args:
        lines: at least one.
        x_label: what was varied, with its unit.
        y_label: what was measured.

    Raises:
        ValueError: no line.
    """
    if not lines:
        raise ValueError("curves needs at least one line, got none")
    figure = blank(5.6, 4.2)
    axes = figure.add_subplot()
    colors = cycle(COLORS)
    looks = zip(lines, cycle(MARKERS), cycle(DASHES), strict=False)
    for depth, (line, marker, dashes) in enumerate(looks):
        color, zorder = line.color or next(colors), 3 - 0.1 * depth
        _draw(axes, line, color, marker=marker, linestyle=dashes, zorder=zorder)
    _scale(axes, sorted({x for line in lines for x in line.x}))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.87", linewidth=0.6)
    axes.set_axisbelow(True)
    columns = min(len(lines), COLUMNS)
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, handlelength=3.4)
    return figure


def _draw(axes: Axes, line: Curve, color: str, **look: Any) -> None:
    order = sorted(range(len(line.x)), key=lambda i: line.x[i])
    x = [line.x[i] for i in order]
    low, high = ([100 * line.intervals[i][side] for i in order] for side in (0, 1))
    axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    axes.plot(
        x,
        [100 * line.accuracy[i] for i in order],
        color=color,
        linewidth=1.4,
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        label=line.label,
        **look,
    )


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Ticks where something was measured; equal factors equally far apart where they are many."""
    if values[0] > 0 and values[-1] / values[0] >= WIDE:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    if len(values) < MANY:
        axes.set_xticks(values, [f"{value:.4g}" for value in values])
