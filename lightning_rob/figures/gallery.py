"""Images on which two attacks differ, with what every member of an ensemble says to them."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_rob.figures.page import COLORS, blank

RIGHT, WRONG = COLORS[2], COLORS[1]
IMAGE, LINE, LETTER = 0.95, 0.13, 0.065  # inches: an image, a line of the answers and a letter


@dataclass(frozen=True)
class Shown:
    """An image and its answers.

    Args:
        image: [C, H, W] in [0, 1], of one channel or three.
        answers: [M] the class that each member takes it for.
        confidence: [M] the probability that the member gives that class.
    """

    image: Tensor
    answers: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Case:
    """One image: clean, and as each of two attacks leaves it.

    Args:
        label: the true class.
        clean: [C, H, W] in [0, 1].
        weak: what the first attack makes of it.
        strong: what the second one makes of it.
    """

    label: int
    clean: Tensor
    weak: Shown
    strong: Shown


def gallery(
    cases: Sequence[Case],
    attacks: tuple[str, str],
    names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw a row per image: clean, then for each attack perturbation, image and answers.

    All perturbations are amplified by one factor, which the figure states; mid-grey is no change.

    Args:
        cases: at least one.
        attacks: what the two attacks are called.
        names: of the classes; None numbers them.
        title: above the figure, broken into lines where it is long.

    Raises:
        ValueError: no case.
    """
    if not cases:
        raise ValueError("a gallery needs at least one case, got none")
    longest = max(len(_name(k, names)) for case in cases for k in _classes(case))
    size = max(IMAGE, LINE * len(cases[0].weak.answers))
    words = LETTER * max(15, longest + 11)
    width = 5 * size + 2 * words + LETTER * longest + 0.8
    figure = blank(width, (size + 0.05) * len(cases) + 0.7)
    ratios = [size, size, size, words, size, size, words]
    grid = figure.subplots(len(cases), 7, squeeze=False, width_ratios=ratios)
    factor = amplification(cases)
    for row, case in zip(grid, cases, strict=True):
        _draw(row[0], case.clean)
        name = _name(case.label, names)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8, weight="bold")
        for place, shown in ((1, case.weak), (4, case.strong)):
            _draw(row[place], 0.5 + factor * (shown.image - case.clean))
            _draw(row[place + 1], shown.image)
            _write(row[place + 2], shown, case.label, names)
            row[place + 2].set_box_aspect(size / words)
    grid[0][0].set_title("clean", fontsize=8)
    for place, attack in ((1, attacks[0]), (4, attacks[1])):
        grid[0][place].set_title(f"change \N{MULTIPLICATION SIGN} {factor:g}", fontsize=8)
        grid[0][place + 1].set_title(attack, fontsize=8)
        grid[0][place + 2].set_title("member: answer", fontsize=8, loc="left")
    if title:
        lines = 1 + len(title) // int(width / 0.085)
        figure.suptitle(
            textwrap.fill(title, len(title) // lines + 8),
            x=0.01,
            ha="left",
            fontsize=9,
            fontweight="bold",
        )
    return figure


def amplification(cases: Sequence[Case]) -> float:
    """By how much perturbations can be multiplied to fill the range, to two digits."""
    parts = [shown.image - case.clean for case in cases for shown in (case.weak, case.strong)]
    largest = max(float(part.abs().max()) for part in parts)
    return float(f"{0.5 / max(largest, 1e-12):.2g}")


def _classes(case: Case) -> list[int]:
    """All that are written of a case."""
    return [case.label, *case.weak.answers.tolist(), *case.strong.answers.tolist()]


def _name(k: int, names: Sequence[str] | None) -> str:
    return str(k) if names is None else names[k]


def _draw(axes: Axes, image: Tensor) -> None:
    """[C, H, W] as it is seen: nearest neighbour, one channel as grey."""
    pixels = image.detach().cpu().float().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_linewidth(0.4)


def _write(axes: Axes, shown: Shown, label: int, names: Sequence[str] | None) -> None:
    """A line for each member, ticked where it is right."""
    axes.set_axis_off()
    members = len(shown.answers)
    answers = zip(shown.answers.tolist(), shown.confidence.tolist(), strict=True)
    for i, (k, share) in enumerate(answers):
        mark, color = ("✓", RIGHT) if k == label else ("✗", WRONG)
        text = f"{mark} {i + 1}: {_name(k, names)}, {share:.0%}"
        height = 0.5 + (0.5 * (members - 1) - i) * min(0.16, 1 / members)
        axes.text(0.02, height, text, color=color, fontsize=7.5, va="center")
