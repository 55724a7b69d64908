"""Rejection curves: what a selective classifier refuses and gets wrong, by its threshold."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_rob.plots import COLORS, DASHES, MARKERS, blank

WIDTH, HEIGHT = 2.7, 3.0  # inches of a panel
MARKS = 9  # of a line, spread evenly


@dataclass(frozen=True)
class Setting:
    """One panel.

    Args:
        label: above it: how x~ was made.
        thresholds: [T] rising, in [0, 1].
        rejected: [T] share of x~ that is rejected.
        rejected_clean: [T] share of z that is rejected.
        error: [T] share that is answered wrongly.
    """

    label: str
    thresholds: Sequence[float]
    rejected: Sequence[float]
    rejected_clean: Sequence[float]
    error: Sequence[float]


def rejection(
    settings: Sequence[Setting], tau: float | None = None, error: str = "error"
) -> Figure:
    """Draw the settings side by side in per cent, with axes of their own but the same scales.

    Args:
        settings: at least one.
        tau: a threshold to mark; None marks none.
        error: what the error is called, for it may be a share of x~ or of the answers.

    Raises:
        ValueError: no setting.
    """
    if not settings:
        raise ValueError("rejection needs at least one setting, got none")
    figure = blank(WIDTH * len(settings) + 0.6, HEIGHT + 0.5)
    panels = figure.subplots(1, len(settings), sharex=True, sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        _draw(axes, setting, error)
        axes.set_title(setting.label, fontsize=9)
        if tau is not None:
            axes.axvline(tau, color="0.5", linewidth=0.8, label=f"threshold {tau:g}", zorder=0)
    panels[0].set_ylabel("%")
    panels[0].set_xlim(-0.02, 1.02)
    panels[0].set_ylim(-3, 103)
    figure.supxlabel("rejection threshold on the probability of being a test image", fontsize=9)
    lines, names = panels[0].get_legend_handles_labels()
    columns = len(names) if len(settings) > 1 else 2
    figure.legend(
        lines, names, loc="outside upper left", ncols=columns, frameon=False, handlelength=3.4
    )
    return figure


def _draw(axes: Axes, setting: Setting, error: str) -> None:
    lines = {
        "rejected of x\N{COMBINING TILDE} (z and attacked)": setting.rejected,
        "rejected of z": setting.rejected_clean,
        error: setting.error,
    }
    looks = zip(lines.items(), COLORS, cycle(MARKERS), cycle(DASHES), strict=False)
    step = max(1, len(setting.thresholds) // MARKS)
    for place, ((label, shares), color, marker, dashes) in enumerate(looks):
        axes.plot(
            setting.thresholds,
            [100 * share for share in shares],
            color=color,
            marker=marker,
            linestyle=dashes,
            markevery=(place * step // 3, step),
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            linewidth=1.4,
            label=label,
            zorder=3 - 0.1 * place,
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.87", linewidth=0.6)
    axes.set_axisbelow(True)
