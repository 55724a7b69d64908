"""All 72 transformations of the pool on one image."""

from textwrap import wrap

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_rob.figures.transforms import Block, grid
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform
from lightning_rob.transforms.pool import GROUPS

WORDS, LETTERS = 0.46, 11  # inches for the text of a row, letters in a line of it


def pool_figure(x: Tensor, seed: int = 0) -> Figure:
    """Draw the image untouched and as each of the 72 leaves it, by group.

    Args:
        x: [C, H, W] in [0, 1], C = 1 or 3.
        seed: of the chance.
    """
    blocks: list[Block] = [("clean", [("", x.expand(3, -1, -1))])]
    for group, members in GROUPS.items():
        pictures = [(_label(name), _transformed(one, x, seed)) for name, one in members.items()]
        blocks.append((group, pictures))
    return grid(blocks, WORDS)


def _label(name: str) -> str:
    """What a picture is called below its group's name, in short lines."""
    words = name.partition("_")[2].replace("_", " ")
    return "\n".join(wrap(words, LETTERS, break_long_words=False))


def _transformed(transform: Transform, x: Tensor, seed: int) -> Tensor:
    streams = Streams.from_index(torch.zeros(1, dtype=torch.int64), seed)
    return transform(x[None], *transform.sample(x[None], streams))[0].expand(3, -1, -1)
