"""Stretched and compressed by an affine map."""

from dataclasses import dataclass

import torch
from kornia.geometry.transform import warp_affine
from torch import Tensor

from lightning_rob.transforms.base import Transform

Point = tuple[float, float]
CORNER, BELOW, RIGHT = (0.25, 0.25), (0.25, 0.5), (0.5, 0.25)


@dataclass(frozen=True)
class ThreePoints(Transform):
    """The affine map that takes three points to three others, bilinear, black outside.

    Points are (x, y) as shares of width and height; those they come from are Athena's.

    Args:
        corner: where (0.25, 0.25) goes.
        below: where (0.25, 0.5) goes.
        right: where (0.5, 0.25) goes.
    """

    corner: Point = CORNER
    below: Point = BELOW
    right: Point = RIGHT

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        rows, columns = x.shape[2:]
        matrix = self.matrix(rows, columns).to(x).expand(len(x), -1, -1)
        return warp_affine(x, matrix, (rows, columns), align_corners=True)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[2, 3], which takes pixels (column, row, 1) of the image to those of the result."""
        size = torch.tensor([columns, rows], dtype=torch.float64)
        before = torch.tensor([CORNER, BELOW, RIGHT], dtype=torch.float64) * size
        after = torch.tensor([self.corner, self.below, self.right], dtype=torch.float64) * size
        solved: Tensor = torch.linalg.solve(torch.cat([before, torch.ones(3, 1)], 1), after)
        return solved.T
