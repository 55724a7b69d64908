"""Blurs by small kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import Transform, between, over_pixels


@dataclass(frozen=True)
class BoxBlur(Transform):
    """Average the square around each pixel; the border is a mirror.

    Args:
        size: side of the square in pixels, odd.
    """

    size: int = 3
    odd = "size"

    def apply(self, x: Tensor) -> Tensor:
        from kornia.filters import box_blur

        return box_blur(x, self.size, "reflect", separable=True)


@dataclass(frozen=True)
class GaussianBlur(Transform):
    """Blur with a Gaussian kernel; the border is a mirror.

    The paper speaks of random size and variance; its authors' configurations fix both, and so do
    the defaults. Several sizes, or a range of deviations, make the blur random.

    Args:
        sizes: sides of the kernel in pixels, odd; each image gets one of them.
        std: lowest and highest standard deviation in pixels.
    """

    sizes: tuple[int, ...] = (3,)
    std: tuple[float, float] = (2.5, 2.5)
    odd = "sizes"
    limits = (("std", 1e-6, float("inf")),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(size [B] int64, std [B, 2] down and across, both in pixels), or () if they are fixed."""
        if len(self.sizes) == 1 and self.std[0] == self.std[1]:
            return ()
        size = sample_one_of(x, self.sizes, generator)
        return size, between(x, *self.std, 2, generator=generator)

    def apply(self, x: Tensor, size: Tensor | None = None, std: Tensor | None = None) -> Tensor:
        from kornia.filters import filter2d_separable, get_gaussian_kernel1d

        # Every kernel is as large as the largest one, with zeros around its own size.
        most = max(self.sizes)
        if std is None:
            std = x.new_tensor(self.std)
        kernels = get_gaussian_kernel1d(most, std.reshape(-1, 1)).view(-1, 2, most)
        if size is not None:
            distance = torch.arange(most, device=x.device) - most // 2
            kernels = kernels * (distance.abs() <= size[:, None] // 2)[:, None]
            # Normalised after the cut, so that a constant image stays as it is.
            kernels = kernels / kernels.sum(-1, keepdim=True)
        down, across = kernels.to(x).expand(len(x), -1, -1).unbind(1)
        return filter2d_separable(x, across, down, "reflect")


@dataclass(frozen=True)
class SizedBlur(Transform):
    """A blur by a square of one odd size in pixels, or of one of several sizes for each image."""

    size: int | tuple[int, ...]
    odd = "size"

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(size [B] int64 in pixels), or () if there is one only."""
        return () if isinstance(self.size, int) else (sample_one_of(x, self.size, generator),)

    def blur_by_size(
        self, x: Tensor, size: Tensor | None, blur: Callable[[Tensor | slice, int], Tensor]
    ) -> Tensor:
        """Blur each image with the square of its size [B] by `blur(rows, size)`."""
        if isinstance(self.size, int) or size is None:
            return blur(slice(None), self.size if isinstance(self.size, int) else self.size[0])
        for side in dict.fromkeys(self.size):
            chosen = size == side
            if torch.compiler.is_exporting():  # shapes must not depend on values
                x = torch.where(over_pixels(chosen), blur(slice(None), side), x)
            elif chosen.any():
                rows = chosen.nonzero()[:, 0]
                x = x.index_copy(0, rows, blur(rows, side))
        return x


@dataclass(frozen=True)
class MedianBlur(SizedBlur):
    """Take the median of the square around each pixel; outside the image is black."""

    size: int | tuple[int, ...] = 3

    def apply(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        def median(rows: Tensor | slice, side: int) -> Tensor:
            padded = pad(x[rows], [side // 2] * 4)
            if side == 3:
                return gather_pixels(padded, _median_index_3x3(padded.detach()), 3)
            squares = padded.detach().unfold(2, side, 1).unfold(3, side, 1)
            return gather_pixels(padded, squares.flatten(-2).median(-1).indices, side)

        return self.blur_by_size(x, size, median)


@dataclass(frozen=True)
class Bilateral(SizedBlur):
    """Blur within edges: average near pixels of near colour (Tomasi and Manduchi 1998).

    One of BaRT's transforms that have a gradient, outside the 33. The border is a mirror. The
    authors' configuration has the deviation of the colour in 8-bit values and their code uses it
    on images in [0, 1], where 5 to 20 leave a mere Gaussian blur.

    Args:
        space: lowest and highest standard deviation of the distance in pixels.
        color: lowest and highest standard deviation of the colour, images span [0, 1]; the distance
            of two colours is the sum of their channels' differences.
    """

    size: int | tuple[int, ...] = 9
    space: tuple[float, float] = (5.0, 20.0)
    color: tuple[float, float] = (5 / 255, 20 / 255)
    limits = (("space", 1e-6, float("inf")), ("color", 1e-6, float("inf")))

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(space [B] in pixels, color [B] in pixel units, and size [B] int64 if there are several).

        The deviations are uniform in their ranges.
        """
        space = between(x, *self.space, generator=generator)
        color = between(x, *self.color, generator=generator)
        return space, color, *super().sample(x, generator)

    def apply(self, x: Tensor, space: Tensor, color: Tensor, size: Tensor | None = None) -> Tensor:
        from kornia.filters import bilateral_blur

        both = space[:, None].expand(-1, 2)
        return self.blur_by_size(
            x, size, lambda rows, side: bilateral_blur(x[rows], side, color[rows], both[rows])
        )


@dataclass(frozen=True)
class MotionBlur(Transform):
    """Blur along a line; outside the image is black.

    Args:
        size: length of the line in pixels, odd.
        angle: largest angle of the line, in degrees.
        direction: largest asymmetry of the kernel; at 1, the weight of one end may be 0.
    """

    size: int = 3
    angle: float = 90.0
    direction: float = 1.0
    odd = "size"

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(angle [B] in degrees, U(-angle, angle); direction [B], U(-direction, direction))."""
        angle = between(x, -self.angle, self.angle, generator=generator)
        return angle, between(x, -self.direction, self.direction, generator=generator)

    def apply(self, x: Tensor, angle: Tensor, direction: Tensor) -> Tensor:
        from kornia.filters import motion_blur

        return motion_blur(x, self.size, angle, direction, "constant", "bilinear")


def sample_one_of(x: Tensor, values: tuple[int, ...], generator: Generator) -> Tensor:
    """[B] int64, one of the values for each image, all equally probable."""
    options = torch.tensor(values, device=x.device)
    return options[(uniform(x, generator=generator) * len(options)).long()]


def _median_index_3x3(padded: Tensor) -> Tensor:
    """[B, C, H, W] int32: which pixel of each 3x3 square is its median, the first of equals."""
    # Each column of three is sorted once for all three squares that share it: minima and maxima of
    # whole images take a fifth of the time of sorting each square.
    top, middle, bottom = padded[:, :, :-2], padded[:, :, 1:-1], padded[:, :, 2:]
    low, high = torch.minimum(top, middle), torch.maximum(top, middle)
    low, mid, high = torch.minimum(low, bottom), _middle(low, high, bottom), high.maximum(bottom)
    a, b, c = ((..., slice(first, first + padded.shape[3] - 2)) for first in range(3))
    lows = torch.maximum(torch.maximum(low[a], low[b]), low[c])
    highs = torch.minimum(torch.minimum(high[a], high[b]), high[c])
    mids = _middle(torch.minimum(mid[a], mid[b]), torch.maximum(mid[a], mid[b]), mid[c])
    # The median of the largest low, the middle mid and the smallest high is that of all nine.
    median = _middle(torch.minimum(lows, mids), torch.maximum(lows, mids), highs)
    index = torch.full_like(median, 4, dtype=torch.int32)  # the centre: a NaN equals no pixel
    for k in reversed(range(9)):
        row, column = divmod(k, 3)
        pixel = padded[:, :, row : row + median.shape[2], column : column + median.shape[3]]
        index = index + (k - index) * (pixel == median).to(index)  # faster than `torch.where`
    return index


def _middle(low: Tensor, high: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(low, torch.minimum(high, other))


def gather_pixels(padded: Tensor, index: Tensor, size: int) -> Tensor:
    """Gather pixel `index` [B, C, H, W] of the square around each, counted row by row."""
    height, width = index.shape[2:]
    square = torch.arange(size**2, device=index.device)
    # One gather has a cheaper backward pass than a sum over squares.
    offset = square // size * padded.shape[3] + square % size
    row = torch.arange(height, device=index.device)[:, None]
    corner = row * padded.shape[3] + torch.arange(width, device=index.device)
    flat = offset.index_select(0, index.flatten()).view_as(index) + corner
    return padded.flatten(2).gather(2, flat.flatten(2)).view_as(index)
