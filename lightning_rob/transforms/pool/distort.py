"""Waves."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_rob.transforms.base import Transform


@dataclass(frozen=True)
class Distort(Transform):
    """Roll each column, or row, round by a sine of its place.

    Column j goes down by int(height H sin(2 pi j / W)) pixels, or row i to the right by
    int(height W sin(2 pi i / H)), rounded towards zero.

    Args:
        axis: "x" rolls columns, "y" rolls rows.
        height: of the wave, a share of the side along which is rolled.
    """

    axis: Literal["x", "y"]
    height: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis not in ("x", "y"):
            raise ValueError(f"axis must be 'x' or 'y', got {self.axis!r}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return _columns_rolled(x, self.height) if self.axis == "x" else self._rows_rolled(x)

    def _rows_rolled(self, x: Tensor) -> Tensor:
        return _columns_rolled(x.mT, self.height).mT


def _columns_rolled(x: Tensor, height: float) -> Tensor:
    rows, columns = x.shape[2:]
    place = [math.sin(2 * math.pi * j / columns) for j in range(columns)]
    shift = torch.tensor([int(height * rows * sine) for sine in place], device=x.device)
    source = (torch.arange(rows, device=x.device)[:, None] - shift) % rows
    return x.gather(2, source.expand_as(x))
