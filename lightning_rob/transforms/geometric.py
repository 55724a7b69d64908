"""Geometric transforms: affine map, crop, flip, swirl."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import EPS, AlphaTransform, Transform, between

MIN_RATIO, TRIES = 3 / 4, 10


class Affine(AlphaTransform):
    """Apply an affine map, the identity with each entry off by at most alpha; zeros outside."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(matrix [B, 2, 3], the identity + U(-alpha, alpha)).

        It maps (x, y, 1) of the result to (x, y) of the image, both from -1 to 1.
        """
        off = between(x, -self.alpha, self.alpha, 2, 3, generator=generator)
        return (torch.eye(2, 3, dtype=x.dtype, device=x.device) + off,)

    def apply(self, x: Tensor, matrix: Tensor) -> Tensor:
        # one grid, multiplied by B matrices: affine_grid of B matrices would bind an exported
        # program to B of 4 or more
        identity = torch.eye(2, 3, dtype=x.dtype, device=x.device)[None]
        positions = affine_grid(identity, [1, 1, *x.shape[2:]], align_corners=False)
        grid = pad(positions, (0, 1), value=1.0).flatten(1, 2) @ matrix.mT
        return grid_sample(x, grid.view(-1, *x.shape[2:], 2), align_corners=False)


@dataclass(frozen=True)
class Crop(AlphaTransform):
    """Cut out a random box and resize it to the whole image, bilinearly (Szegedy et al. 2015).

    Args:
        alpha: the box has a share of the area in 1 - alpha … 1 + alpha, unless there is a range of
            its sides.
        sides: lowest and highest share that the box has of the height and, drawn independently, of
            the width, in place of alpha: BaRT's zoom.
    """

    sides: tuple[float, float] | None = None
    limits = (("sides", 0, 1),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(box [B, 4] int64: top, left, height, width in pixels, within the image)."""
        rows, columns = x.shape[2:]
        if self.sides:
            image = x.new_tensor([rows, columns])
            size = (image * between(x, *self.sides, 2, generator=generator)).round().clamp_min(1)
            corner = (uniform(x, 2, generator=generator) * (image - size + 1)).floor()
            return (torch.cat([corner, size], 1).long(),)
        # As torchvision's `RandomResizedCrop`: the area is a share U(1 - alpha, 1 + alpha), the
        # logarithm of width to height uniform from log(3/4) to log(4/3).
        u = uniform(x, TRIES, 2, generator=generator)
        area = rows * columns * (1 - self.alpha + (2 * self.alpha) * u[..., 0] + EPS)
        ratio = MIN_RATIO ** (1 - 2 * u[..., 1])
        sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], -1).round()
        image = sides.new_tensor([rows, columns])
        # The first draw that fits into the image, else the largest central box of such a ratio.
        fits = ((sides >= 1) & (sides <= image)).all(-1)
        first = fits.to(torch.uint8).argmax(1)
        found = fits.any(1)[:, None]
        central = sides.new_tensor(_largest_box(rows, columns))
        size = torch.where(found, sides[torch.arange(len(x), device=x.device), first], central)
        place = torch.where(found, uniform(x, 2, generator=generator), 0.5)
        corner = (place * (image - size + found)).floor()
        return (torch.cat([corner, size], 1).long(),)

    def apply(self, x: Tensor, box: Tensor) -> Tensor:
        from kornia.geometry.transform import remap

        (rows, columns), (top, left, height, width) = x.shape[2:], box.to(x).unbind(1)
        row = _source_positions(rows, top, height)[:, :, None].expand(-1, rows, columns)
        column = _source_positions(columns, left, width)[:, None].expand(-1, rows, columns)
        return remap(x, column, row, padding_mode="border", align_corners=True)


def _largest_box(rows: int, columns: int) -> tuple[int, int]:
    """Return height and width of the largest box whose ratio is from 3/4 to 4/3."""
    return min(rows, round(columns / MIN_RATIO)), min(columns, round(rows / MIN_RATIO))


def _source_positions(length: int, start: Tensor, side: Tensor) -> Tensor:
    """[B, length]: where in the image each pixel of the resized box lies, along one side."""
    center = torch.arange(length, device=start.device, dtype=start.dtype) + 0.5
    # The centres of pixels lie at halves, as in resizing without aligned corners.
    inside = center * (side[:, None] / length) - 0.5
    return start[:, None] + torch.minimum(inside.clamp_min(0), side[:, None] - 1)


class HorizontalFlip(Transform):
    """Exchange left and right."""

    def apply(self, x: Tensor) -> Tensor:
        return x.flip(3)


class VerticalFlip(Transform):
    """Exchange top and bottom."""

    def apply(self, x: Tensor) -> Tensor:
        return x.flip(2)


@dataclass(frozen=True)
class Swirl(AlphaTransform):
    """Turn the image about a random pixel, less and less with the distance; zeros outside.

    Args:
        alpha: for images of H rows, the radius is at most 2 alpha H pixels and the strength at most
            alpha H radians, each unless there is a range of it.
        released_code: also blacken pixels that come from the last row or column, or from less than
            a pixel outside, as the weights of the authors' bilinear interpolation do.
        radius: lowest and highest radius in pixels, in place of alpha.
        strength: lowest and highest strength in radians, in place of alpha.
    """

    released_code: bool = False
    radius: tuple[float, float] | None = None
    strength: tuple[float, float] | None = None
    limits = (("radius", 0, math.inf), ("strength", 0, math.inf))

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor, Tensor]:
        """(center [B, 2], radius [B], strength [B]).

        The center's column and row are whole pixels anywhere in the image, the radius, in pixels,
        is U(0, 2 alpha H), the strength, in radians, U(0, alpha H), or U of their ranges.
        """
        rows, columns = x.shape[2:]
        place = uniform(x, 2, generator=generator) * x.new_tensor([columns, rows])
        most = self.alpha * rows
        radius = between(x, *(self.radius or (0, 2 * most)), generator=generator)
        return place.floor(), radius, between(x, *(self.strength or (0, most)), generator=generator)

    def apply(self, x: Tensor, center: Tensor, radius: Tensor, strength: Tensor) -> Tensor:
        from kornia.geometry.transform import remap

        rows, columns = x.shape[2:]
        left, top = center[:, :, None, None].unbind(1)
        down = torch.arange(rows, device=x.device, dtype=x.dtype)[:, None] - top
        right = torch.arange(columns, device=x.device, dtype=x.dtype) - left
        # As in scikit-image: less than a thousandth of the rotation is left at `radius`.
        reach = (radius * (math.log(2) / 5)).clamp_min(EPS)[:, None, None]
        angle = strength[:, None, None] * torch.exp(-torch.hypot(right, down) / reach)
        column = left + right * angle.cos() - down * angle.sin()
        row = top + right * angle.sin() + down * angle.cos()
        y = remap(x, column, row, align_corners=True)
        if not self.released_code:
            return y
        inside = (column >= 0) & (column < columns - 1) & (row >= 0) & (row < rows - 1)
        return y * inside[:, None]
