"""Shifts in colour spaces, and mixtures with grey; all need three channels."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
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
    soft_modulo,
)

# The authors' numbers; those of kornia depend on its version.
TO_YUV = ((0.299, 0.587, 0.114), (-0.147, -0.289, 0.436), (0.615, -0.515, -0.100))
FROM_YUV = ((1.0, 0.0, 1.14), (1.0, -0.396, -0.581), (1.0, 2.029, 0.0))
HUE_SHARE, LAB_RANGE, LAB_CHROMA, YUV_CHROMA = 0.2, 100.0, 40.0, 0.4

TURN = 2 * math.pi
# In each of the six sectors of the hue, which of (value, falling, low, rising) a channel is:
# rows are red, green and blue.
SECTORS = ((0, 1, 2, 2, 3, 0), (3, 0, 0, 1, 2, 2), (2, 2, 3, 0, 0, 1))


def rgb_to_hsv(x: Tensor) -> Tensor:
    """Convert RGB to HSV with a gradient everywhere, as the RT paper's authors compute it.

    The hue of the angle h is 2 pi mod~(h / 2 pi) with the soft modulo of eq. 15.

    Args:
        x: [B, 3, H, W] in [0, 1].

    Returns:
        [B, 3, H, W]: hue in radians, saturation and value.
    """
    value, largest = x.max(1)
    spread = value - x.amin(1)
    red, green, blue = x.unbind(1)
    difference = torch.stack([green - blue, blue - red, red - green], 1)
    difference = difference.gather(1, largest[:, None])[:, 0]
    sextant = difference / torch.where(spread == 0, 1, spread) + 2 * largest
    hue = TURN * soft_modulo(sextant / 6)
    return torch.stack([hue, spread / value.clamp_min(EPS), value], 1)


def hsv_to_rgb(x: Tensor) -> Tensor:
    """Convert HSV, the hue in radians, to RGB; only close to an inverse of `rgb_to_hsv`.

    The sector is that of the true hue, the position in it that of the soft modulo.

    Args:
        x: [B, 3, H, W].

    Returns:
        [B, 3, H, W].
    """
    hue, saturation, value = x.unbind(1)
    turns = hue / TURN
    sector = (6 * turns.detach()).floor() % 6
    position = 6 * soft_modulo(turns) - sector
    low = value * (1 - saturation)
    falling = value * (1 - position * saturation)
    rising = value * (1 - (1 - position) * saturation)
    planes = torch.stack([value, falling, low, rising], 1)
    choice = torch.tensor(SECTORS, device=x.device)[:, sector.long()].transpose(0, 1)
    return planes.gather(1, choice)


def jitter_hsv(x: Tensor, factor: Tensor, shift: Tensor, shifted: Tensor) -> Tensor:
    """Scale saturations and shift hues in a single round trip through HSV.

    Args:
        x: [B, 3, H, W] RGB.
        factor: [B] of the saturations, which are clamped at 1.
        shift: [B] of the hues, in radians.
        shifted: [B] bool, whether the hue goes through the soft modulo at all: even a shift by 0
            changes it.

    Returns:
        [B, 3, H, W] RGB.
    """
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    shift, shifted, factor = (each[:, None, None] for each in (shift, shifted, factor))
    hue = torch.where(shifted, TURN * soft_modulo((hue + shift) / TURN), hue)
    return hsv_to_rgb(torch.stack([hue, clip(saturation * factor, 0, 1), value], 1))


def _sample_shift(x: Tensor, largest: tuple[float, float, float], generator: Generator) -> Tensor:
    """[B, 3] uniform within plus or minus the largest shift of each channel."""
    return between(x, -1, 1, 3, generator=generator) * x.new_tensor(largest)


def _clamp_except(x: Tensor, unclamped: tuple[int, ...], low: float, high: float) -> Tensor:
    """Clamp all channels but the given ones."""
    free = torch.zeros(x.shape[1], 1, 1, dtype=torch.bool, device=x.device)
    free[list(unclamped)] = True
    return torch.where(free, x, clip(x, low, high))


def mix_channels(x: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiply the channels of each pixel, [B, C, H, W], by a matrix [C, C]."""
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
        return (_sample_shift(x, (HUE_SHARE * self.alpha, self.alpha, self.alpha), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        hsv = rgb_to_hsv(x) + over_pixels(shift)
        return hsv_to_rgb(_clamp_except(hsv, () if self.released_code else (0,), 0, 1))


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
        return (_sample_shift(x, (LAB_RANGE * self.alpha, chroma, chroma), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        from kornia.color import lab_to_rgb, rgb_to_lab

        self._need_rgb(x)
        lab = rgb_to_lab(raised(x, EPS)) + over_pixels(shift)
        lab = _clamp_except(lab, () if self.released_code else (1, 2), 0, LAB_RANGE)
        return lab_to_rgb(lab, clip=False)


@dataclass(frozen=True)
class XYZ(Transform):
    """Shift each of X, Y and Z by at most alpha, in CIE XYZ clamped to [0, 1].

    The clamp, as the authors have it, dims the blue of whites (Z up to 1.089) even without shift.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of X, Y and Z, U(-alpha, alpha))."""
        return (_sample_shift(x, (self.alpha,) * 3, generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        from kornia.color import rgb_to_xyz, xyz_to_rgb

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
        return (_sample_shift(x, (self.alpha, chroma, chroma), generator),)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        yuv = mix_channels(x, TO_YUV) + over_pixels(shift)
        yuv = _clamp_except(yuv, () if self.released_code else (1, 2), 0, 1)
        return mix_channels(yuv, FROM_YUV)


def _sample_weights(x: Tensor, generator: Generator, *dropped: Tensor) -> Tensor:
    """[B, 3] weights of the channels in a grey: U(0, 1) each, 0 if dropped, scaled to sum to 1."""
    weights = uniform(x, 3, generator=generator)
    for channel in dropped:
        weights = weights * (torch.arange(3, device=x.device) != channel[:, None])
    return weights / weights.sum(1, keepdim=True).clamp_min(EPS)


def _grey(x: Tensor, weights: Tensor) -> Tensor:
    """[B, 1, H, W] the weighted sum of the channels."""
    return (x * over_pixels(weights)).sum(1, keepdim=True)


def _is_channel(channel: Tensor, x: Tensor) -> Tensor:
    """[B, 3, 1, 1] bool, true at the given channel of each image."""
    return over_pixels(torch.arange(3, device=x.device) == channel[:, None])


@dataclass(frozen=True)
class Gray(Transform):
    """Replace all channels by one random mixture of them."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(weights [B, 3] of red, green and blue, each U(0, 1), then scaled to sum to one)."""
        return (_sample_weights(x, generator),)

    def apply(self, x: Tensor, weights: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return _grey(x, weights).expand_as(x)


@dataclass(frozen=True)
class GrayMix(Transform):
    """Blend each channel with a random grey, whose share is at most alpha."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`; share [B, 3] of the grey in each channel, U(0, alpha))."""
        return _sample_weights(x, generator), between(x, 0, self.alpha, 3, generator=generator)

    def apply(self, x: Tensor, weights: Tensor, share: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        share = over_pixels(share)
        return x * (1 - share) + _grey(x, weights) * share


@dataclass(frozen=True)
class GrayTwoChannels(Transform):
    """Replace two channels by a random grey and keep one random channel."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`; kept [B] int64, the channel that stays)."""
        return _sample_weights(x, generator), integers(x, 0, 2, generator=generator)

    def apply(self, x: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return torch.where(_is_channel(kept, x), x, _grey(x, weights))


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
        """Return the transform with a grey of all three channels."""
        return replace(self, mixed=3)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`, one of them 0 if two are mixed; replaced [B] int64)."""
        replaced = integers(x, 0, 2, generator=generator)
        dropped = [integers(x, 0, 2, generator=generator)] if self.mixed == 2 else []
        return _sample_weights(x, generator, *dropped), replaced

    def apply(self, x: Tensor, weights: Tensor, replaced: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        return torch.where(_is_channel(replaced, x), _grey(x, weights), x)
