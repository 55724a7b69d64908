"""A matrix of accuracies, each number in a cell of its shade."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from lightning_rob.figures.page import blank

CELL = 0.52  # inches
DARK = 70  # per cent from which white has more contrast with the shade than black


def heat_map(
    matrix: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    row_label: str = "answering member",
    column_label: str = "attacked member",
    unit: str = "accuracy in %",
) -> Figure:
    """Draw a matrix of shares as numbers in per cent, darker where they are larger.

    The shades span 0 to 100 %, so that figures can be laid side by side.

    Args:
        matrix: [R, C] in [0, 1].
        rows: R names.
        columns: C names.
        title: above the figure; its lines are not broken.
        row_label: what the rows are.
        column_label: what the columns are.
        unit: what the shades are.

    Raises:
        ValueError: the names are not as many as the rows and columns.
    """
    if matrix.shape != (len(rows), len(columns)):
        raise ValueError(
            f"a matrix {list(matrix.shape)} needs as many names, "
            f"got {len(rows)} rows and {len(columns)} columns"
        )
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
    _write(axes, percent)
    return image


def _write(axes: Axes, percent: Tensor) -> None:
    """A number in each cell, and white lines between them."""
    for i, row in enumerate(percent.tolist()):
        for j, value in enumerate(row):
            color = "white" if value > DARK else "black"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=color)
    for edge in range(1, percent.shape[1]):
        axes.axvline(edge - 0.5, color="white", linewidth=1.5)
    for edge in range(1, percent.shape[0]):
        axes.axhline(edge - 0.5, color="white", linewidth=1.5)
