"""Transformations that move pixels: rotations, flips, shifts, affine maps, waves, projections."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from skimage import transform
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import NumpyImage, NumpyTransform, Transform, map_images
from lightning_rob.transforms.geometric import Swirl

Point = tuple[float, float]
CORNER, BELOW, RIGHT = (0.25, 0.25), (0.25, 0.5), (0.5, 0.25)


class Identity(Transform):
    """Return the image unchanged."""

    reversible = True

    def apply(self, x: Tensor) -> Tensor:
        return x

    def undo(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Rotate(Transform):
    """Rotate anticlockwise by quarter turns, exactly; images must be square for all but two.

    Athena's code rotates about the pixel (14, 14), which is not the centre of 28 pixels, and so
    loses a line of the image; this one rotates about the true centre.
    """

    quarters: Literal[1, 2, 3]
    reversible = True

    def apply(self, x: Tensor) -> Tensor:
        if self.quarters != 2 and x.shape[2] != x.shape[3]:
            raise ValueError(f"a quarter turn needs square images, got {list(x.shape)}")
        return x.rot90(self.quarters, (2, 3))

    def undo(self, x: Tensor) -> Tensor:
        return x.rot90(-self.quarters, (2, 3))


@dataclass(frozen=True)
class Flip(Transform):
    """Mirror the image from left to right, from top to bottom, or both."""

    horizontal: bool = False
    vertical: bool = False
    reversible = True

    def apply(self, x: Tensor) -> Tensor:
        return x.flip([2] * self.vertical + [3] * self.horizontal)

    def undo(self, x: Tensor) -> Tensor:
        return self.apply(x)


@dataclass(frozen=True)
class Shift(Transform):
    """Shift by whole pixels; the new pixels are black, those beyond the border are lost.

    A later version of Athena's code shifts by fractions of a pixel, which also blurs.
    """

    rows: float = 0.0  # downwards, as a share of the height, rounded towards zero to pixels
    columns: float = 0.0  # to the right, as a share of the width
    reversible = True
    limits = (("rows", -1, 1), ("columns", -1, 1))

    def apply(self, x: Tensor) -> Tensor:
        down, right = int(self.rows * x.shape[2]), int(self.columns * x.shape[3])
        return pad(x, [right, -right, down, -down])

    def undo(self, x: Tensor) -> Tensor:
        """Shift back; 0 where `kept` is false, as the shift has lost those pixels."""
        return Shift(-self.rows, -self.columns).apply(x)

    def kept(self, x: Tensor) -> Tensor:
        """[H, W] bool: the pixels of images as large as x that survive a shift and its undoing."""
        return self.undo(self.apply(torch.ones_like(x[:1, :1])))[0, 0] > 0


@dataclass(frozen=True)
class ThreePointAffine(Transform):
    """Apply the affine map that takes three points to three others, bilinear, black outside.

    Points are (x, y) as shares of width and height; the three source points are Athena's.
    """

    corner: Point = CORNER  # target of (0.25, 0.25)
    below: Point = BELOW  # target of (0.25, 0.5)
    right: Point = RIGHT  # target of (0.5, 0.25)

    def apply(self, x: Tensor) -> Tensor:
        from kornia.geometry.transform import warp_affine

        rows, columns = x.shape[2:]
        matrix = self.matrix(rows, columns).to(x).expand(len(x), -1, -1)
        return warp_affine(x, matrix, (rows, columns), align_corners=True)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[2, 3], which maps pixels (column, row, 1) of the image to those of the result."""
        size = torch.tensor([columns, rows], dtype=torch.float64)
        source = torch.tensor([CORNER, BELOW, RIGHT], dtype=torch.float64) * size
        target = torch.tensor([self.corner, self.below, self.right], dtype=torch.float64) * size
        solved: Tensor = torch.linalg.solve(torch.cat([source, torch.ones(3, 1)], 1), target)
        return solved.T


@dataclass(frozen=True)
class Distort(Transform):
    """Roll each column ("x"), or row ("y"), cyclically by a sine of its index.

    Column j moves down by int(H / 5 sin(2 pi j / W)) pixels, or row i to the right by
    int(W / 5 sin(2 pi i / H)), rounded towards zero.
    """

    axis: Literal["x", "y"]

    def apply(self, x: Tensor) -> Tensor:
        x = x if self.axis == "x" else x.mT
        rows, columns = x.shape[2:]
        sines = [math.sin(2 * math.pi * j / columns) for j in range(columns)]
        shift = torch.tensor([int(0.2 * rows * sine) for sine in sines], device=x.device)
        source = (torch.arange(rows, device=x.device)[:, None] - shift) % rows
        rolled = x.gather(2, source.expand_as(x))
        return rolled if self.axis == "x" else rolled.mT


class CentralSwirl(Transform):
    """Swirl the image by 3 radians about its centre, less with the distance; a mirror outside.

    As `skimage.transform.swirl` of radius 65 pixels, whose centre is the pixel (W / 2, H / 2).
    """

    def apply(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[2:]
        # As much mirror image as the farthest corner needs when it is turned.
        reach = math.hypot(rows, columns) / 2
        down, across = (min(math.ceil(reach - n / 2) + 1, n - 1) for n in (rows, columns))
        mirrored = pad(x, [across, across, down, down], mode="reflect")
        center = x.new_tensor([across + columns / 2, down + rows / 2]).expand(len(x), 2)
        radius, strength = (x.new_full((len(x),), number) for number in (65.0, 3.0))
        swirled = Swirl().apply(mirrored, center, radius, strength)
        return swirled[..., down : down + rows, across : across + columns]


@dataclass(frozen=True)
class RadonReconstruction(NumpyTransform):
    """Project the image along 28 directions (Radon transform) and reconstruct it.

    Each channel, scaled to [-1, 1], within the largest circle; pixels outside become mid-grey.
    Athena's code projects the pixels outside as well, against its library's advice.
    """

    first: float  # angle in degrees
    last: float  # end of the angles, excluded
    algebraic: bool = False  # by SART (Andersen and Kak 1984), else by filtered back-projection

    def apply(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[2:]
        side = max(rows, columns)
        square = pad(2 * x - 1, [0, side - columns, 0, side - rows])  # by mid-grey
        return map_images(square, self.transform_image)[..., :rows, :columns] / 2 + 0.5

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        angles = np.linspace(self.first, self.last, 28, endpoint=False)
        center = image.shape[-1] // 2
        squares = (np.arange(image.shape[-1]) - center) ** 2
        # scikit-image's Radon transform takes the image for zero outside of the circle.
        inside = squares[:, None] + squares <= center**2
        sinograms = [transform.radon(plane * inside, angles) for plane in image]  # type: ignore[no-untyped-call]
        invert: Callable[..., NumpyImage] = (
            transform.iradon_sart if self.algebraic else transform.iradon
        )
        return np.stack([invert(sinogram, angles) for sinogram in sinograms])
