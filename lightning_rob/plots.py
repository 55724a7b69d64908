"""Figures: accuracy curves, heat maps, the gallery of images, the convergence of a search."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_rob.runtime.files import atomic_write

# Okabe and Ito (2008): distinct for the colour-blind, and in grey by their order.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "os^DvP*X"
DASHES: tuple[Any, ...] = (
    *("-", "--", "-."),
    *((0, (1, 1.4)), (0, (5, 1.5)), (0, (3, 1.5, 1, 1.5, 1, 1.5))),
)
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
LOG_RATIO = 20  # largest over smallest value from which the axis is logarithmic
MOST_TICKS = 12  # values from which not every one is a tick
CELL = 0.52  # inches of a heat map's cell
DARK = 70  # per cent from which white has more contrast with the shade than black
RIGHT, WRONG = COLORS[2], COLORS[1]
IMAGE, LINE, LETTER = 0.95, 0.13, 0.065  # inches of a gallery's image, line of text and letter


def blank(width: float = 4.8, height: float = 3.2) -> Figure:
    """Return an empty figure, size in inches, laid out so that no label is cut off."""
    with rc_context(STYLE):
        return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, dpi: int = 160) -> Path:
    """Write the figure as PNG, PDF or SVG, by its suffix; the folder is made."""
    kind = path.suffix[1:] or None
    atomic_write(path, lambda draft: figure.savefig(draft, dpi=dpi, format=kind))
    return path


def pixels(figure: Figure, dpi: int = 120) -> Tensor:
    """Return the figure as an image [3, H, W] in [0, 1], for loggers."""
    figure.set_dpi(dpi)
    # Drawn in memory: no window system is needed.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    rgb = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return torch.from_numpy(rgb).permute(2, 0, 1).float() / 255


def _grid_lines(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.87", linewidth=0.6)
    axes.set_axisbelow(True)


@dataclass(frozen=True)
class Curve:
    """A line of `curves`: accuracies [N] in [0, 1] at x [N]; None takes the next of `COLORS`."""

    label: str
    x: Sequence[float]
    accuracy: Sequence[float]
    intervals: Sequence[tuple[float, float]]
    color: str | None = None


def curves(lines: Sequence[Curve], x_label: str, y_label: str) -> Figure:
    """Draw accuracies in per cent, each line with a band of its intervals; distinct in grey too."""
    figure = blank(5.6, 4.2)
    axes = figure.add_subplot()
    colors = cycle(COLORS)
    looks = zip(lines, cycle(MARKERS), cycle(DASHES), strict=False)
    for depth, (line, marker, dashes) in enumerate(looks):
        # A sweep may list its values in any order; a line has to rise along x.
        order = sorted(range(len(line.x)), key=lambda i: line.x[i])
        x, color = [line.x[i] for i in order], line.color or next(colors)
        low, high = ([100 * line.intervals[i][side] for i in order] for side in (0, 1))
        # Marker and dashes differ too, so that lines remain distinct in grey.
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        axes.plot(
            x,
            [100 * line.accuracy[i] for i in order],
            color=color,
            marker=marker,
            linestyle=dashes,
            zorder=3 - 0.1 * depth,
            linewidth=1.4,
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            label=line.label,
        )
    values = sorted({x for line in lines for x in line.x})
    if values[0] > 0 and values[-1] / values[0] >= LOG_RATIO:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    if len(values) < MOST_TICKS:
        axes.set_xticks(values, [f"{value:.4g}" for value in values])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _grid_lines(axes)
    columns = min(len(lines), 2)
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, handlelength=3.4)
    return figure


def bars(
    names: Sequence[str], accuracies: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> Figure:
    """Draw accuracies in per cent as bars with their intervals; the last one stands out."""
    widest = max(map(len, names))
    figure = blank(0.6 + len(names) * max(0.7, LETTER * widest + 0.2))
    axes = figure.add_subplot()
    places, percent = range(len(names)), [100 * accuracy for accuracy in accuracies]
    ends = list(zip(*intervals, strict=True))
    away = [[abs(100 * end - at) for end, at in zip(side, percent, strict=True)] for side in ends]
    colors = [COLORS[0]] * (len(names) - 1) + [COLORS[1]]
    axes.bar(places, percent, color=colors, yerr=away, capsize=3, error_kw={"linewidth": 1})
    axes.set_xticks(places, [f"{n}\n{at:.1f}" for n, at in zip(names, percent, strict=True)])
    axes.set(ylabel="accuracy in %, 95 % intervals", ylim=(0, 100))
    _grid_lines(axes)
    return figure


def trace(found: Any) -> Figure:
    """Draw loss, margin and gradient norm of a `Trace` by step: an image's line ends as it leaves.

    A margin below 0 is a misclassified image.
    """
    figure = blank(9.0, 2.8)
    for place, name in enumerate(("loss", "margin", "gradient_norm"), 1):
        axes = figure.add_subplot(1, 3, place)
        for row, color in zip(getattr(found, name).cpu(), cycle(COLORS), strict=False):
            axes.plot(row, color=color, linewidth=1.2, marker=".", markersize=3)
        if name == "margin":
            axes.axhline(0, color="0.5", linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel(name.replace("_", " "))
        _grid_lines(axes)
    return figure


def convergence(objectives: Sequence[float | None], label: str) -> Figure:
    """Draw the objective of each trial [N], the first untuned, None if failed, and the best."""
    found = {i: o for i, o in enumerate(objectives) if o is not None}
    figure = blank(5.6, 3.6)
    axes = figure.add_subplot()
    axes.plot([*found], [*found.values()], "o", color=COLORS[0], markersize=4, label="trials")
    # The best so far, continued to the last trial, also one that failed.
    best = list(accumulate(found.values(), max))
    ends = [*found, len(objectives) - 1]
    axes.step(ends, [*best, best[-1]], where="post", color=COLORS[2], label="best so far")
    if 0 in found:
        axes.axhline(found[0], color="0.5", linestyle="--", linewidth=1, label="untuned")
    axes.set_xlabel("trial")
    axes.set_ylabel(label)
    _grid_lines(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper left", ncols=5, columnspacing=1.2, frameon=False)
    return figure


def heat_map(
    matrix: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    row_label: str = "predicting member",
    column_label: str = "attacked member",
    unit: str = "accuracy in %",
) -> Figure:
    """Draw a matrix [R, C] in [0, 1] as numbers in per cent, with shades that span 0 to 100 %."""
    percent = 100 * matrix.detach().cpu().double()
    figure = blank(max(CELL * len(columns), 1.2) + 1.7, max(CELL * len(rows), 1.2) + 1.1)
    axes = figure.add_subplot()
    image = shade(axes, percent, rows, columns)
    axes.set_xlabel(column_label)
    axes.set_ylabel(row_label)
    bar = figure.colorbar(image, ax=axes, label=unit, ticks=range(0, 101, 25))
    bar.outline.set_visible(False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    return figure


def shade(axes: Axes, percent: Tensor, rows: Sequence[str], columns: Sequence[str]) -> AxesImage:
    """Draw the cells of a matrix [R, C] in per cent with their names."""
    image = axes.imshow(percent.numpy(), cmap="Blues", vmin=0, vmax=100)
    turned: Any = {"rotation": 45, "ha": "right"} if max(map(len, columns)) > 4 else {}
    axes.set_xticks(range(len(columns)), columns, **turned)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for i, row in enumerate(percent.tolist()):
        for j, value in enumerate(row):
            color = "white" if value > DARK else "black"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=color)
    for edge in range(1, percent.shape[1]):
        axes.axvline(edge - 0.5, color="white", linewidth=1.5)
    for edge in range(1, percent.shape[0]):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5)
    return image


@dataclass(frozen=True)
class MemberPredictions:
    """An image [C, H, W] in [0, 1] with each member's predicted class [M] and its probability."""

    image: Tensor
    classes: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class GalleryRow:
    """An image [C, H, W] in [0, 1], clean and under each of two attacks, with its true class."""

    label: int
    clean: Tensor
    weak: MemberPredictions
    strong: MemberPredictions


def gallery(
    rows: Sequence[GalleryRow],
    attacks: tuple[str, str],
    names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw a row per image: clean, then for each attack perturbation, image and predictions.

    All perturbations are amplified by one factor, which the figure states; mid-grey is no change.
    `attacks` are the names of the two attacks, `names` the classes' names; None numbers them.
    """
    name = str if names is None else names.__getitem__
    shown = [p for row in rows for p in (row.weak, row.strong)]
    classes = {row.label for row in rows} | {k for p in shown for k in p.classes.tolist()}
    longest = max(len(name(k)) for k in classes)
    size = max(IMAGE, LINE * len(rows[0].weak.classes))
    text = LETTER * max(15, longest + 11)
    width = 5 * size + 2 * text + LETTER * longest + 0.8
    figure = blank(width, (size + 0.05) * len(rows) + 0.7)
    ratios = [size, size, size, text, size, size, text]
    grid = figure.subplots(len(rows), 7, squeeze=False, width_ratios=ratios)
    factor = amplification(rows)
    for axes, row in zip(grid, rows, strict=True):
        _draw_image(axes[0], row.clean)
        place: Any = {"rotation": 0, "ha": "right", "va": "center"}
        axes[0].set_ylabel(name(row.label), fontsize=8, weight="bold", **place)
        for column, attacked in ((1, row.weak), (4, row.strong)):
            _draw_image(axes[column], 0.5 + factor * (attacked.image - row.clean))
            _draw_image(axes[column + 1], attacked.image)
            _write_predictions(axes[column + 2], attacked, row.label, name)
            axes[column + 2].set_box_aspect(size / text)
    grid[0][0].set_title("clean", fontsize=8)
    for column, attack in ((1, attacks[0]), (4, attacks[1])):
        grid[0][column].set_title(f"change \N{MULTIPLICATION SIGN} {factor:g}", fontsize=8)
        grid[0][column + 1].set_title(attack, fontsize=8)
        grid[0][column + 2].set_title("member: class", fontsize=8, loc="left")
    if title:
        lines = 1 + len(title) // int(width / 0.085)
        title = textwrap.fill(title, len(title) // lines + 8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    return figure


def amplification(rows: Sequence[GalleryRow]) -> float:
    """Return the factor, to two digits, by which perturbations just fill the range."""
    parts = [attacked.image - row.clean for row in rows for attacked in (row.weak, row.strong)]
    largest = max(float(part.abs().max()) for part in parts)
    return float(f"{0.5 / max(largest, 1e-12):.2g}")


def _draw_image(axes: Axes, image: Tensor) -> None:
    values = image.detach().cpu().float().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(values, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_linewidth(0.4)


def _write_predictions(
    axes: Axes, attacked: MemberPredictions, label: int, name: Callable[[int], str]
) -> None:
    """Write a line for each member, ticked where it is right."""
    axes.set_axis_off()
    members = len(attacked.classes)
    predictions = zip(attacked.classes.tolist(), attacked.confidence.tolist(), strict=True)
    for i, (k, share) in enumerate(predictions):
        mark, color = ("✓", RIGHT) if k == label else ("✗", WRONG)
        text = f"{mark} {i + 1}: {name(k)}, {share:.0%}"
        height = 0.5 + (0.5 * (members - 1) - i) * min(0.16, 1 / members)
        axes.text(0.02, height, text, color=color, fontsize=7.5, va="center")
