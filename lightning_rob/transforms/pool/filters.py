"""Filters of small windows: edges, blur, ranks, entropy."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from kornia.filters import filter2d, filter2d_separable, get_gaussian_kernel1d
from skimage import filters, morphology
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.blur import picked
from lightning_rob.transforms.one_by_one import Picture, each
from lightning_rob.transforms.pool.eight_bit import levels

SLOPES = {  # the derivative downwards, as correlated; across is its transpose, but for Roberts
    "sobel": ((-1, -2, -1), (0, 0, 0), (1, 2, 1)),
    "scharr": ((-3, -10, -3), (0, 0, 0), (3, 10, 3)),
    "prewitt": ((-1, -1, -1), (0, 0, 0), (1, 1, 1)),
    "roberts": ((0, 0, 0), (0, -1, 0), (0, 0, 1)),
}
FLAT = 1e-12  # under the root, where the slope of an image without edges would be infinite


@dataclass(frozen=True)
class Edges(Transform):
    """The length of the derivative, at most 1 on a step from black to white, as in scikit-image.

    Each channel by itself, where Athena's code makes colour images grey; the border is repeated.

    Args:
        kind: sobel, scharr, prewitt or roberts.
    """

    kind: Literal["sobel", "scharr", "prewitt", "roberts"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in SLOPES:
            raise ValueError(f"kind must be of {tuple(SLOPES)}, got {self.kind!r}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        down = x.new_tensor(SLOPES[self.kind])
        down = down / down.clamp_min(0).sum()
        across = _other_diagonal(down) if self.kind == "roberts" else down.T
        slopes = [filter2d(x, kernel[None], "replicate") for kernel in (down, across)]
        return ((slopes[0] ** 2 + slopes[1] ** 2) / 2 + FLAT).sqrt()


def _other_diagonal(kernel: Tensor) -> Tensor:
    """The kernel's two columns on the right exchanged."""
    return torch.cat([kernel[:, :1], kernel[:, 1:].flip(1)], 1)


@dataclass(frozen=True)
class Gaussian(Transform):
    """A Gaussian blur as far as four deviations; the border is a mirror that repeats the edge.

    As `scipy.ndimage.gaussian_filter`, which Athena's code calls. Each channel by itself, where
    that code also blurs the colours of a pixel into each other.

    Args:
        std: standard deviation in pixels.
    """

    std: float = 1.0

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        reach = int(4 * self.std + 0.5)
        kernel = get_gaussian_kernel1d(2 * reach + 1, self.std, device=x.device, dtype=x.dtype)
        rows, columns = (_mirrored(side, reach, x.device) for side in x.shape[2:])
        padded = x.index_select(2, rows).index_select(3, columns)
        return filter2d_separable(padded, kernel, kernel, padding="valid")


def _mirrored(side: int, reach: int, device: torch.device) -> Tensor:
    """[side + 2 reach] int64: the pixels from -reach on; -1 is pixel 0 again, -2 is pixel 1."""
    place = torch.arange(-reach, side + reach, device=device) % (2 * side)
    return torch.minimum(place, 2 * side - 1 - place)


@dataclass(frozen=True)
class Rank(Transform):
    """The value of a given rank in the square around each pixel, each channel by itself.

    The border is repeated. Athena's rank 15 is of a cube through the channels: in the 27 values
    of a grey image, each there three times, it is the sixth of nine.

    Args:
        place: from 0, the least, to size^2 - 1, the largest.
        size: side of the square in pixels, odd.
    """

    place: int
    size: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 3 or self.size % 2 == 0:
            raise ValueError(f"size must be odd and at least 3, got {self.size}")
        if not 0 <= self.place < self.size**2:
            raise ValueError(f"place must be 0 … {self.size**2 - 1}, got {self.place}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]; the gradient goes to the pixel of that rank."""
        padded = pad(x, [self.size // 2] * 4, mode="replicate")
        squares = padded.detach().unfold(2, self.size, 1).unfold(3, self.size, 1).flatten(-2)
        place = squares.kthvalue(self.place + 1).indices
        return picked(padded, place, self.size)


@dataclass(frozen=True)
class Entropy(Transform):
    """The entropy of the eight-bit values in a disk around each pixel, each channel by itself.

    1 is the most there can be: as many values as pixels. Athena's code takes half a bit for 1 (or,
    in another version, a quarter) and adds 0.5, so that most of the image is white.

    Args:
        radius: of the disk in pixels.
    """

    radius: int = 2

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        window = morphology.disk(self.radius)[None]  # type: ignore[no-untyped-call]

        def entropy(image: Picture) -> Picture:
            eight_bit = image.astype("uint8")
            bits: Picture = filters.rank.entropy(eight_bit, window)  # type: ignore[no-untyped-call]
            return bits / math.log2(window.sum())

        return each(levels(x), entropy)
