"""How a search went: what each trial reached, and the best so far."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_rob.figures.page import COLORS, blank


def convergence(objectives: Sequence[float | None], initial: int, label: str) -> Figure:
    """Draw the trials in their order, the first of which is untuned.

    Args:
        objectives: [N] of each trial; None if it failed.
        initial: so many came before the optimiser proposed any.
        label: what is maximised.

    Raises:
        ValueError: no trial, or all failed.
    """
    found = {i: o for i, o in enumerate(objectives) if o is not None}
    if not found:
        raise ValueError(f"convergence needs a trial that did not fail, got {len(objectives)}")
    figure = blank(5.6, 3.6)
    axes = figure.add_subplot()
    kinds = {
        "initial": ("s", COLORS[1], [i for i in found if i < initial]),
        "proposed": ("o", COLORS[0], [i for i in found if i >= initial]),
    }
    for name, (marker, color, numbers) in kinds.items():
        heights = [found[i] for i in numbers]
        axes.plot(numbers, heights, marker, color=color, markersize=4, label=name)
    failed = [i for i in range(len(objectives)) if i not in found]
    if failed:
        lowest = [min(found.values())] * len(failed)
        axes.plot(failed, lowest, "x", color="0.4", markersize=5, label="failed")
    best = list(accumulate(found.values(), max))
    ends = [*found, len(objectives) - 1]
    axes.step(ends, [*best, best[-1]], where="post", color=COLORS[2], label="best so far")
    if 0 in found:
        axes.axhline(found[0], color="0.5", linestyle="--", linewidth=1, label="untuned")
    axes.set_xlabel("trial")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.87", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper left", ncols=5, columnspacing=1.2, frameon=False)
    return figure
