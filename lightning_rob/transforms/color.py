"""Shifts in colour spaces, and mixtures with grey; all need three channels."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    AlphaTransform,
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

TURN = 2 * math.pi
LEVEL = 1 / 255  # of images of 8 bits
# A channel is value * (1 - below * saturation); in each of the six sectors of the hue, `below` is
# offset + slope * the position in the sector. Rows are red, green and blue.
OFFSETS = ((0, 0, 1, 1, 1, 0), (1, 0, 0, 0, 1, 1), (1, 1, 1, 0, 0, 0))
SLOPES = ((0, 1, 0, 0, -1, 0), (-1, 0, 0, 1, 0, 0), (0, 0, -1, 0, 0, 1))


def rgb_to_hsv(x: Tensor) -> Tensor:
    """Convert RGB [B, 3, H, W] to HSV with a gradient everywhere, as the RT paper's authors do."""
    red, green, blue = x.unbind(1)
    largest = x.detach().amax(1)
    # Masks are numbers: sums of products take a fraction of the time of `torch.where`. Of equal
    # channels the first is the largest, and has the slope.
    is_red = (red == largest).to(x)
    is_green = (green == largest).to(x) * (1 - is_red)
    is_blue = 1 - is_red - is_green
    value = red * is_red + green * is_green + blue * is_blue
    spread = value - x.amin(1)
    difference = (green - blue) * is_red + (blue - red) * is_green + (red - green) * is_blue
    sextant = difference / (spread + (spread == 0)) + (2 * is_green + 4 * is_blue)
    # The hue h, in radians, goes through the soft modulo of eq. 15: 2 pi mod~(h / 2 pi).
    hue = TURN * soft_modulo(sextant / 6)
    saturation = spread / value.clamp_min(EPS)
    # Below one level the slope is that of a level: at black it would outweigh all other pixels.
    dark = (largest < LEVEL).to(x)
    bounded = saturation.detach() + (spread - spread.detach()) / LEVEL
    return torch.stack([hue, saturation + dark * (bounded - saturation), value], 1)


def hsv_to_rgb(x: Tensor) -> Tensor:
    """Convert HSV, the hue in radians, to RGB; only close to an inverse of `rgb_to_hsv`."""
    hue, saturation, value = x.unbind(1)
    turns = hue / TURN
    sector = (6 * turns.detach()).floor()
    sector = sector - 6 * (sector / 6).floor()
    # The true hue decides the sector, the soft modulo the position in it.
    position = (6 * soft_modulo(turns) - sector)[:, None]
    places = sector.to(torch.int32).clamp(0, 5).flatten()  # a NaN is anywhere
    slope, below = (
        torch.stack([x.new_tensor(row).index_select(0, places).view_as(hue) for row in rows], 1)
        for rows in (SLOPES, OFFSETS)
    )
    return value[:, None] * (1 - (below + slope * position) * saturation[:, None])


def jitter_hsv(x: Tensor, factor: Tensor, shift: Tensor, shifted: Tensor) -> Tensor:
    """Scale saturations by [B] and shift hues by [B] radians in one round trip through HSV."""
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    shift, shifted, factor = (each[:, None, None] for each in (shift, shifted, factor))
    shifted = shifted.to(x)
    # Even a shift by 0 changes a hue, so that others skip the soft modulo.
    hue = shifted * (TURN * soft_modulo((hue + shift) / TURN)) + (1 - shifted) * hue
    return hsv_to_rgb(torch.stack([hue, clip(saturation * factor, 0, 1), value], 1))


def mix_channels(x: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiply the channels of each pixel, [B, C, H, W], by a matrix [C, C]."""
    return torch.einsum("ij,bjhw->bihw", x.new_tensor(matrix), x)


def _clamp_except(x: Tensor, unclamped: tuple[int, ...], high: float) -> Tensor:
    """Clamp all channels but the given ones to [0, high]."""
    channels = enumerate(x.unbind(1))
    return torch.stack([c if i in unclamped else clip(c, 0, high) for i, c in channels], 1)


class ColorShift(AlphaTransform):
    """A shift of each channel of a color space by at most alpha times its `span`."""

    channels = (3,)
    span: ClassVar[tuple[float, float, float]]

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(shift [B, 3] of the space's channels, U(-alpha span, alpha span))."""
        largest = x.new_tensor([span * self.alpha for span in self.span])
        return (between(x, -1, 1, 3, generator=generator) * largest,)


@dataclass(frozen=True)
class HSV(ColorShift):
    """Shift hue, saturation and value.

    Args:
        alpha: largest shift of saturation and value; a fifth of it, in radians, that of the hue.
        released_code: clamp the hue, in radians, to [0, 1] too, as the authors' code does by
            accident: only reds to yellow-greens are left.
    """

    released_code: bool = False
    span = (0.2, 1.0, 1.0)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        hsv = rgb_to_hsv(x) + over_pixels(shift)
        return hsv_to_rgb(_clamp_except(hsv, () if self.released_code else (0,), 1))


@dataclass(frozen=True)
class LAB(ColorShift):
    """Shift lightness and chroma in CIE L*a*b*.

    Args:
        alpha: the largest shift is 100 alpha of the lightness and 40 alpha of a and b.
        released_code: clamp a and b to [0, 100] too, as the authors' code does and the paper does
            not say: greens and blues are lost.
    """

    released_code: bool = False
    span = (100.0, 40.0, 40.0)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        from kornia.color import lab_to_rgb, rgb_to_lab

        lab = rgb_to_lab(raised(x, EPS)) + over_pixels(shift)
        lab = _clamp_except(lab, () if self.released_code else (1, 2), 100)
        return lab_to_rgb(lab, clip=False)


class XYZ(ColorShift):
    """Shift each of X, Y and Z by at most alpha, in CIE XYZ clamped to [0, 1].

    The clamp, as the authors have it, dims the blue of whites (Z up to 1.089) even without shift.
    """

    span = (1.0, 1.0, 1.0)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        from kornia.color import rgb_to_xyz, xyz_to_rgb

        return xyz_to_rgb(clip(rgb_to_xyz(x) + over_pixels(shift), 0, 1))


@dataclass(frozen=True)
class YUV(ColorShift):
    """Shift luma and chroma in YUV.

    Args:
        alpha: largest shift of Y; 0.4 alpha that of U and V.
        released_code: clamp U and V to [0, 1] too, as the authors' code does and the paper does
            not say: negative chroma is lost.
    """

    released_code: bool = False
    span = (1.0, 0.4, 0.4)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        yuv = mix_channels(x, TO_YUV) + over_pixels(shift)
        yuv = _clamp_except(yuv, () if self.released_code else (1, 2), 1)
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


def _where_channel(channel: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """[B, 3, H, W] `chosen` at the given channel of each image, `other` at the two others."""
    # A sum of products takes a fraction of the time of `torch.where`.
    mask = over_pixels(torch.arange(3, device=channel.device) == channel[:, None]).to(chosen)
    return chosen * mask + other * (1 - mask)


class Gray(Transform):
    """Replace all channels by one random mixture of them."""

    channels = (3,)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(weights [B, 3] of red, green and blue, each U(0, 1), then scaled to sum to one)."""
        return (_sample_weights(x, generator),)

    def apply(self, x: Tensor, weights: Tensor) -> Tensor:
        return _grey(x, weights).expand_as(x)


class GrayMix(AlphaTransform):
    """Blend each channel with a random grey, whose share is at most alpha."""

    channels = (3,)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`; share [B, 3] of the grey in each channel, U(0, alpha))."""
        return _sample_weights(x, generator), between(x, 0, self.alpha, 3, generator=generator)

    def apply(self, x: Tensor, weights: Tensor, share: Tensor) -> Tensor:
        share = over_pixels(share)
        return x * (1 - share) + _grey(x, weights) * share


class GrayTwoChannels(Transform):
    """Replace two channels by a random grey and keep one random channel."""

    channels = (3,)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`; kept [B] int64, the channel that stays)."""
        return _sample_weights(x, generator), integers(x, 0, 2, generator=generator)

    def apply(self, x: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
        return _where_channel(kept, x, _grey(x, weights))


@dataclass(frozen=True)
class GrayOneChannel(Transform):
    """Replace one random channel by a random grey.

    Args:
        mixed: channels in the grey: two random ones, as the paper says, or all 3, as its code has.
    """

    mixed: Literal[2, 3] = 2
    channels = (3,)

    def as_released(self) -> Self:
        return replace(self, mixed=3)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(weights [B, 3] as in `Gray`, one of them 0 if two are mixed; replaced [B] int64)."""
        replaced = integers(x, 0, 2, generator=generator)
        dropped = [integers(x, 0, 2, generator=generator)] if self.mixed == 2 else []
        return _sample_weights(x, generator, *dropped), replaced

    def apply(self, x: Tensor, weights: Tensor, replaced: Tensor) -> Tensor:
        return _where_channel(replaced, _grey(x, weights), x)
