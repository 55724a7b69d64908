"""Shifts in colour spaces, and mixtures with grey; all need three channels."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from kornia.color import lab_to_rgb, rgb_to_lab, rgb_to_xyz, xyz_to_rgb
from torch import Tensor

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    Transform,
    between,
    clip,
    integers,
    over_pixels,
    raised,
)
from lightning_rob.transforms.hsv import hsv_to_rgb, rgb_to_hsv

# The authors' figures; those of kornia depend on its version.
TO_YUV = ((0.299, 0.587, 0.114), (-0.147, -0.289, 0.436), (0.615, -0.515, -0.100))
FROM_YUV = ((1.0, 0.0, 1.14), (1.0, -0.396, -0.581), (1.0, 2.029, 0.0))
HUE_SHARE, LAB_RANGE, LAB_CHROMA, YUV_CHROMA = 0.2, 100.0, 40.0, 0.4


def _shifts(x: Tensor, most: tuple[float, float, float], generator: Generator) -> Tensor:
    """[B, 3] uniform within plus or minus the most of each channel."""
    return between(x, -1, 1, 3, generator=generator) * x.new_tensor(most)


def _clamp_some(x: Tensor, keep: tuple[int, ...], low: float, high: float) -> Tensor:
    """All channels clamped except those to keep."""
    free = torch.zeros(x.shape[1], 1, 1, dtype=torch.bool, device=x.device)
    free[list(keep)] = True
    return torch.where(free, x, clip(x, low, high))


def _linear(x: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    return torch.einsum("ij,bjhw->bihw", x.new_tensor(matrix), x)


@dataclass(frozen=True)
class HSV(Transform):
    """Shift hue, saturation and value.

    Args:
        alpha: largest shift of saturation and value; a fifth of it, in radians, that of the hue.
        released_code: clamp the hue, in radians, to [0, 1] too, as the authors' code does by
            accident: only reds to yellow-greens are left.
    """

    alpha: float = 0.5
    released_code: bool = False

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of hue, U(-alpha/5, alpha/5) radians, and of s and v, U(-alpha, alpha))."""
        return (_shifts(x, (HUE_SHARE * self.alpha, self.alpha, self.alpha), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        hsv = rgb_to_hsv(x) + over_pixels(shift)
        return hsv_to_rgb(_clamp_some(hsv, () if self.released_code else (0,), 0, 1))


@dataclass(frozen=True)
class LAB(Transform):
    """Shift lightness and chroma in CIE L*a*b*.

    Args:
        alpha: the largest shift is 100 alpha of the lightness and 40 alpha of a and b.
        released_code: clamp a and b to [0, 100] too, as the authors' code does and the paper does
            not say: greens and blues are lost.
    """

    alpha: float = 0.5
    released_code: bool = False

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of L, U(-100 alpha, 100 alpha), and of a and b, U(-40 alpha, 40 alpha))."""
        chroma = LAB_CHROMA * self.alpha
        return (_shifts(x, (LAB_RANGE * self.alpha, chroma, chroma), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        lab = rgb_to_lab(raised(x, EPS)) + over_pixels(shift)
        lab = _clamp_some(lab, () if self.released_code else (1, 2), 0, LAB_RANGE)
        return lab_to_rgb(lab, clip=False)


@dataclass(frozen=True)
class XYZ(Transform):
    """Shift each of X, Y and Z by at most alpha, in CIE XYZ clamped to [0, 1].

    The clamp, as the authors have it, dims the blue of whites (Z up to 1.089) even without shift.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of X, Y and Z, U(-alpha, alpha))."""
        return (_shifts(x, (self.alpha,) * 3, generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return xyz_to_rgb(clip(rgb_to_xyz(x) + over_pixels(shift), 0, 1))


@dataclass(frozen=True)
class YUV(Transform):
    """Shift luma and chroma in YUV.

    Args:
        alpha: largest shift of Y; 0.4 alpha that of U and V.
        released_code: clamp U and V to [0, 1] too, as the authors' code does and the paper does
            not say: negative chroma is lost.
    """

    alpha: float = 0.5
    released_code: bool = False

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of Y, U(-alpha, alpha), and of U and V, U(-0.4 alpha, 0.4 alpha))."""
        chroma = YUV_CHROMA * self.alpha
        return (_shifts(x, (self.alpha, chroma, chroma), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        yuv = _linear(x, TO_YUV) + over_pixels(shift)
        return _linear(_clamp_some(yuv, () if self.released_code else (1, 2), 0, 1), FROM_YUV)


def _shares(x: Tensor, generator: Generator, *dropped: Tensor) -> Tensor:
    """[B, 3] shares of the channels in a grey: U(0, 1) each, then scaled to sum to one."""
    shares = uniform(x, 3, generator=generator)
    for channel in dropped:
        shares = shares * (torch.arange(3, device=x.device) != channel[:, None])
    return shares / shares.sum(1, keepdim=True).clamp_min(EPS)


def _grey(x: Tensor, shares: Tensor) -> Tensor:
    """[B, 1, H, W]."""
    return (x * over_pixels(shares)).sum(1, keepdim=True)


def _is_channel(chosen: Tensor, x: Tensor) -> Tensor:
    """[B, 3, 1, 1], true at the chosen channel."""
    return over_pixels(torch.arange(3, device=x.device) == chosen[:, None])


@dataclass(frozen=True)
class Gray(Transform):
    """Replace all channels by one random mixture of them."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shares [B, 3] of red, green and blue, each U(0, 1), then scaled to sum to one)."""
        return (_shares(x, generator),)

    def apply(self, x: Tensor, shares: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return _grey(x, shares).expand_as(x)


@dataclass(frozen=True)
class GrayMix(Transform):
    """Blend each channel with a random grey, to a share of at most alpha."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(shares [B, 3] as in `Gray`; weight [B, 3] of the grey in each channel, U(0, alpha))."""
        return _shares(x, generator), between(x, 0, self.alpha, 3, generator=generator)

    def apply(self, x: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        weight = over_pixels(weight)
        return x * (1 - weight) + _grey(x, shares) * weight


@dataclass(frozen=True)
class GrayTwoChannels(Transform):
    """Replace two channels by a random grey; one random channel stays."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(shares [B, 3] as in `Gray`; kept [B] int64, the channel that stays)."""
        return _shares(x, generator), integers(x, 0, 2, generator=generator)

    def apply(self, x: Tensor, shares: Tensor, kept: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return torch.where(_is_channel(kept, x), x, _grey(x, shares))


@dataclass(frozen=True)
class GrayOneChannel(Transform):
    """Replace one random channel by a random grey.

    Args:
        mixed: channels in the grey: two random ones, as the paper says, or all 3, as its code has.

    Raises:
        ValueError: mixed is neither 2 nor 3.
    """

    mixed: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixed not in (2, 3):
            raise ValueError(f"mixed must be 2 or 3 channels, got {self.mixed}")

    def as_released(self) -> Self:
        """The transform with a grey of all three channels."""
        return replace(self, mixed=3)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(shares [B, 3] as in `Gray`, one of them 0 if two are mixed; replaced [B] int64)."""
        replaced = integers(x, 0, 2, generator=generator)
        dropped = [integers(x, 0, 2, generator=generator)] if self.mixed == 2 else []
        return _shares(x, generator, *dropped), replaced

    def apply(self, x: Tensor, shares: Tensor, replaced: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return torch.where(_is_channel(replaced, x), _grey(x, shares), x)
