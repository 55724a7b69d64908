"""Blurs by small kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kornia.filters import bilateral_blur, box_blur, filter2d_separable, motion_blur
from torch import Tensor

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import Transform, between, check_range, over_pixels


def _check_odd(name: str, size: int) -> None:
    if size < 3 or size % 2 == 0:
        raise ValueError(f"{name} must be odd and at least 3, got {size}")


@dataclass(frozen=True)
class BoxBlur(Transform):
    """The mean of a square around each pixel; the border is a mirror.

    Args:
        size: side of the square in pixels, odd.
    """

    size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd("size", self.size)

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return box_blur(x, self.size, "reflect")


@dataclass(frozen=True)
class GaussianBlur(Transform):
    """A Gaussian blur; the border is a mirror.

    The paper speaks of random size and variance, its authors' configurations fix both: so do the
    defaults. Several sizes, or a range of deviations, make it random.

    Args:
        sizes: sides of the kernel in pixels, odd, one of which each image gets.
        std: lowest and highest standard deviation in pixels.

    Raises:
        ValueError: an even size, or an empty range.
    """

    sizes: tuple[int, ...] = (3,)
    std: tuple[float, float] = (2.5, 2.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "std", tuple(self.std))
        if not self.sizes or not 0 < self.std[0] <= self.std[1]:
            raise ValueError(f"no kernel has size {self.sizes} and deviation {self.std}")
        for size in self.sizes:
            _check_odd("each of sizes", size)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(size [B] int64, std [B, 2] down and across, both in pixels), or () if they are fixed."""
        if len(self.sizes) == 1 and self.std[0] == self.std[1]:
            return ()
        sizes = torch.tensor(self.sizes, device=x.device)
        chosen = (uniform(x, generator=generator) * len(sizes)).long()
        return sizes[chosen], between(x, *self.std, 2, generator=generator)

    def apply(self, x: Tensor, size: Tensor | None = None, std: Tensor | None = None) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        if size is None:
            size = torch.tensor(self.sizes, device=x.device)
        if std is None:
            std = x.new_tensor([self.std])
        reach = max(self.sizes) // 2
        distance = torch.arange(-reach, reach + 1, device=x.device)
        within = (distance.abs() <= size[:, None] // 2)[:, None]
        weights = within * torch.exp(-((distance / std[..., None]) ** 2) / 2)
        down, across = (weights / weights.sum(-1, keepdim=True)).to(x).unbind(1)
        return filter2d_separable(x, across, down, "reflect")


@dataclass(frozen=True)
class MedianBlur(Transform):
    """The median of a square around each pixel; outside the image is black.

    Args:
        size: side of the square in pixels, odd; or several, one of which each image gets.

    Raises:
        ValueError: an even size, or none.
    """

    size: int | tuple[int, ...] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self.size)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(size [B] int64 in pixels), or () if there is one only."""
        return () if isinstance(self.size, int) else (_drawn(x, self.size, generator),)

    def apply(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]; the gradient goes to the pixel that is the median."""
        return _by_size(x, self.size, size, lambda rows, side: _median(x[rows], side))


@dataclass(frozen=True)
class Bilateral(Transform):
    """Blur within edges: near pixels of near colour are averaged (Tomasi and Manduchi 1998).

    None of the 33, but one of BaRT's that have a gradient. The border is a mirror. The authors'
    configuration has the deviation of the colour in 8-bit values and their code takes it for images
    in [0, 1], where 5 to 20 leave a mere Gaussian blur.

    Args:
        size: side of the window in pixels, odd; or several, one of which each image gets.
        space: lowest and highest standard deviation of the distance in pixels.
        color: lowest and highest standard deviation of the colour, images span [0, 1]; the distance
            of two colours is the sum of their channels' differences.

    Raises:
        ValueError: an even size, or none, or an empty range.
    """

    size: int | tuple[int, ...] = 9
    space: tuple[float, float] = (5.0, 20.0)
    color: tuple[float, float] = (5 / 255, 20 / 255)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self.size)
        for name in ("space", "color"):
            check_range(name, getattr(self, name), 1e-6, float("inf"))

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(space [B] in pixels, color [B] in pixel units, and size [B] int64 if there are several).

        The deviations are uniform in their ranges.
        """
        space = between(x, *self.space, generator=generator)
        color = between(x, *self.color, generator=generator)
        sizes = () if isinstance(self.size, int) else (_drawn(x, self.size, generator),)
        return space, color, *sizes

    def apply(self, x: Tensor, space: Tensor, color: Tensor, size: Tensor | None = None) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        both = space[:, None].expand(-1, 2)
        return _by_size(
            x, self.size, size, lambda rows, k: bilateral_blur(x[rows], k, color[rows], both[rows])
        )


@dataclass(frozen=True)
class MotionBlur(Transform):
    """A blur along a line; outside the image is black.

    Args:
        size: length of the line in pixels, odd.
        angle: largest angle of the line, in degrees.
        direction: largest lopsidedness; at 1 one end of the line may weigh all, the other none.
    """

    size: int = 3
    angle: float = 90.0
    direction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_odd("size", self.size)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(angle [B] in degrees, U(-angle, angle); direction [B], U(-direction, direction))."""
        angle = between(x, -self.angle, self.angle, generator=generator)
        return angle, between(x, -self.direction, self.direction, generator=generator)

    def apply(self, x: Tensor, angle: Tensor, direction: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return motion_blur(x, self.size, angle, direction, "constant", "bilinear")


def _check_sizes(size: int | tuple[int, ...]) -> None:
    if not size:
        raise ValueError("size must name at least one side, got none")
    for side in (size,) if isinstance(size, int) else size:
        _check_odd("size", side)


def _drawn(x: Tensor, sizes: tuple[int, ...], generator: Generator) -> Tensor:
    """[B] int64, one of the sizes for each image."""
    sides = torch.tensor(sizes, device=x.device)
    return sides[(uniform(x, generator=generator) * len(sides)).long()]


def _by_size(
    x: Tensor,
    sizes: int | tuple[int, ...],
    size: Tensor | None,
    blur: Callable[[Tensor | slice, int], Tensor],
) -> Tensor:
    """Each image with the kernel of its size.

    Args:
        x: [B, C, H, W].
        sizes: that there are.
        size: [B] those of the images; None where there is one only.
        blur: (rows, size) -> these images blurred.
    """
    if isinstance(sizes, int) or size is None:
        return blur(slice(None), sizes if isinstance(sizes, int) else sizes[0])
    for side in dict.fromkeys(sizes):
        chosen = size == side
        if torch.compiler.is_exporting():  # where no length may hang on values
            x = torch.where(over_pixels(chosen), blur(slice(None), side), x)
        elif chosen.any():
            rows = chosen.nonzero()[:, 0]
            x = x.index_copy(0, rows, blur(rows, side))
    return x


def _median(x: Tensor, size: int) -> Tensor:
    padded = torch.nn.functional.pad(x, [size // 2] * 4)
    if size == 3:
        return picked(padded, _place_of_nine(padded.detach()), 3)
    squares = padded.detach().unfold(2, size, 1).unfold(3, size, 1)
    return picked(padded, squares.flatten(-2).median(-1).indices, size)


def _place_of_nine(padded: Tensor) -> Tensor:
    """Which pixel of each 3x3 square is its median, the first of equals: [B, C, H, W] int64.

    Of columns sorted once for all three squares that share them the median is that of the largest
    of the lowest, the middle of the middle and the lowest of the largest: minima and maxima of
    whole images, in a fifth of the time that sorting each square takes.
    """
    top, middle, bottom = padded[:, :, :-2], padded[:, :, 1:-1], padded[:, :, 2:]
    low, high = torch.minimum(top, middle), torch.maximum(top, middle)
    low, mid, high = torch.minimum(low, bottom), _middle(low, high, bottom), high.maximum(bottom)
    a, b, c = ((..., slice(first, first + padded.shape[3] - 2)) for first in range(3))
    lows = torch.maximum(torch.maximum(low[a], low[b]), low[c])
    highs = torch.minimum(torch.minimum(high[a], high[b]), high[c])
    mids = _middle(torch.minimum(mid[a], mid[b]), torch.maximum(mid[a], mid[b]), mid[c])
    median = _middle(torch.minimum(lows, mids), torch.maximum(lows, mids), highs)
    place = torch.full_like(median, 4, dtype=torch.uint8)  # the centre, where there is no number
    for k in reversed(range(9)):
        row, column = divmod(k, 3)
        pixel = padded[:, :, row : row + median.shape[2], column : column + median.shape[3]]
        place.masked_fill_(pixel == median, k)
    return place.long()


def _middle(low: Tensor, high: Tensor, other: Tensor) -> Tensor:
    """The middle one of three, of which two are sorted."""
    return torch.maximum(low, torch.minimum(high, other))


def picked(padded: Tensor, place: Tensor, size: int) -> Tensor:
    """One pixel of the square around each, gathered: cheaper backwards than through all squares.

    Args:
        padded: [B, C, H + size - 1, W + size - 1] the image with its border.
        place: [B, C, H, W] int64, which pixel of the square, row by row.
        size: side of the squares in pixels.

    Returns:
        [B, C, H, W].
    """
    height, width = place.shape[2:]
    row = place // size + torch.arange(height, device=place.device)[:, None]
    column = place % size + torch.arange(width, device=place.device)
    index = row * padded.shape[3] + column
    return padded.flatten(2).gather(2, index.flatten(2)).view_as(place)
