"""All random transforms on one photograph, each at low, middle and high strength."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_rob.plots import blank
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform, catalogue

STRENGTHS = (0.1, 0.3, 0.5)
COLUMNS, SIDE, WORDS = 12, 0.64, 0.34  # images a row, inches of an image and of its lines of text

Block = tuple[str, list[tuple[str, Tensor]]]


def transforms(x: Tensor, seed: int = 0) -> Figure:
    """Draw the image once untouched and as each of the 33 transforms leaves it.

    The same chance serves all strengths, so that a row shows what strength does. Those without a
    strength are drawn three times where there is chance in them, else once.

    Args:
        x: [3, H, W] in [0, 1].
        seed: of the chance.
    """
    blocks: list[Block] = [("the image", [("", x)])]
    blocks += [(name, examples(kind, x, seed)) for name, kind in catalogue().items()]
    return grid(blocks)


def grid(blocks: Sequence[Block], words: float = WORDS) -> Figure:
    """Draw blocks of pictures one after the other, each under its name.

    Args:
        blocks: their names and pictures [3, H, W] in [0, 1], each with what to call it.
        words: inches for the lines of text of a row.
    """
    places = arranged([len(pictures) for _, pictures in blocks])
    rows = places[-1][0] + 1
    figure = blank(COLUMNS * SIDE, rows * (SIDE + words))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.01, wspace=0, hspace=0)
    cells = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes in cells.flat:
        axes.set_axis_off()
    for (row, column), (name, pictures) in zip(places, blocks, strict=True):
        _draw(list(cells[row, column : column + len(pictures)]), name, pictures)
    return figure


def arranged(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Row and column at which each block starts, if none is broken over two rows."""
    row, column, places = 0, 0, []
    for length in lengths:
        if column + length > COLUMNS:
            row, column = row + 1, 0
        places.append((row, column))
        column += length
    return places


def examples(kind: type[Transform], x: Tensor, seed: int) -> list[tuple[str, Tensor]]:
    """A transform's pictures [3, H, W] and what to call them."""
    if "alpha" in kind.__dataclass_fields__:
        strong = [(f"alpha {a:g}", kind(**{"alpha": a}), 0) for a in STRENGTHS]
    else:
        strong = [("", kind(), draw) for draw in range(3 if kind().sample(x[None]) else 1)]
    return [(label, _transformed(transform, x, seed, draw)) for label, transform, draw in strong]


def _transformed(transform: Transform, x: Tensor, seed: int, draw: int) -> Tensor:
    streams = Streams.from_index(torch.tensor([draw]), seed)
    return transform(x[None], *transform.sample(x[None], streams))[0]


def _draw(axes: Sequence[Axes], name: str, pictures: list[tuple[str, Tensor]]) -> None:
    """A block: its name over a line as long as its pictures, and what each is called below it."""
    for place, (label, image) in zip(axes, pictures, strict=True):
        pixels = image.permute(1, 2, 0).detach().cpu().numpy()
        place.imshow((255 * pixels).round().astype(np.uint8), interpolation="nearest")
        place.text(0.5, -0.05, label, fontsize=6, ha="center", va="top", transform=place.transAxes)
        end = 1.0 if place is axes[-1] else 1.24
        place.plot([0, end], [1.05] * 2, "k", lw=0.7, transform=place.transAxes, clip_on=False)
    axes[len(axes) // 2].set_title(name, fontsize=5.7, pad=5)
