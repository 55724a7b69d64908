"""Shifts in colour spaces, and mixtures with grey; all need three channels."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    AlphaTransform,
    Transform,
    between,
    clip,
    differentiates,
    integers,
    over_pixels,
    raised,
    soft_modulo,
    soft_modulo_slope,
)

# The authors' numbers; those of kornia depend on its version.
TO_YUV = ((0.299, 0.587, 0.114), (-0.147, -0.289, 0.436), (0.615, -0.515, -0.100))
FROM_YUV = ((1.0, 0.0, 1.14), (1.0, -0.396, -0.581), (1.0, 2.029, 0.0))
TO_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
FROM_XYZ = (
    (3.2404813432005266, -1.5371515162713185, -0.4985363261688878),
    (-0.9692549499965682, 1.8759900014898907, 0.0415559265582928),
    (0.0556466391351772, -0.2040413383665112, 1.0573110696453443),
)
WHITE = (0.95047, 1.0, 1.08883)  # D65

TURN = 2 * math.pi
# A channel is value * (1 - below * saturation); in each of the six sectors of the hue, `below` is
# offset + slope * the position in the sector. Rows are red, green and blue.
OFFSETS = ((0, 0, 1, 1, 1, 0), (1, 0, 0, 0, 1, 1), (1, 1, 1, 0, 0, 0))
SLOPES = ((0, 1, 0, 0, -1, 0), (-1, 0, 0, 1, 0, 0), (0, 0, -1, 0, 0, 1))


def rgb_to_hsv(x: Tensor) -> Tensor:
    """Convert RGB [B, 3, H, W] to HSV with a gradient everywhere, as the RT paper's authors do."""
    # The hue h, in radians, goes through the soft modulo of eq. 15: 2 pi mod~(h / 2 pi).
    return _ToHSV.apply(x) if differentiates(x) else _to_hsv(x)[0]


def _refuse_second_derivative() -> None:
    """Raise RuntimeError inside a backward pass that is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise RuntimeError("HSV and L*a*b* cannot be differentiated twice: leave out create_graph")


def _to_hsv(x: Tensor) -> tuple[Tensor, ...]:
    """Return HSV, the spread of the channels, which is the largest, and the hue in sextants."""
    red, green, blue = x.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    # Masks are numbers: sums of products take a fraction of the time of `torch.where`.
    is_red = (red == value).to(x)
    is_green = (green == value).to(x) * (1 - is_red)
    is_blue = 1 - is_red - is_green
    difference = (green - blue) * is_red + (blue - red) * is_green + (red - green) * is_blue
    sextant = difference / (spread + (spread == 0)) + (2 * is_green + 4 * is_blue)
    hue = TURN * soft_modulo(sextant / 6)
    hsv = torch.stack([hue, spread / value.clamp_min(EPS), value], 1)
    return hsv, spread, is_red, is_green, sextant


class _ToHSV(torch.autograd.Function):
    """The gradient of `rgb_to_hsv` in one pass: autograd's takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hsv, *rest = _to_hsv(x)
        ctx.save_for_backward(x, *rest)
        return hsv

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _refuse_second_derivative()
        x, spread, is_red, is_green, sextant = ctx.saved_tensors
        of_hue, of_saturation, of_value = gradient.unbind(1)
        value, is_blue = x.amax(1), 1 - is_red - is_green
        turned = of_hue * soft_modulo_slope(sextant / 6) * (TURN / 6) / (spread + (spread == 0))
        share = of_saturation / value.clamp_min(EPS)
        of_spread = share - turned * (sextant - 2 * is_green - 4 * is_blue)
        bright = (value >= EPS).to(x)
        of_value = of_value + of_spread - share * bright * spread / value.clamp_min(EPS)
        # several smallest channels share the slope of the minimum, as in torch's `amin`
        smallest = (x == x.amin(1, keepdim=True)).to(x)
        red, green, blue = (smallest * (of_spread / smallest.sum(1))[:, None]).unbind(1)
        of_red = is_red * of_value - red + (is_blue - is_green) * turned
        of_green = is_green * of_value - green + (is_red - is_blue) * turned
        of_blue = is_blue * of_value - blue + (is_green - is_red) * turned
        return torch.stack([of_red, of_green, of_blue], 1)


def hsv_to_rgb(x: Tensor) -> Tensor:
    """Convert HSV, the hue in radians, to RGB; only close to an inverse of `rgb_to_hsv`."""
    return _FromHSV.apply(x) if differentiates(x) else _from_hsv(x)[0]


def _from_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return RGB, by how much of the chroma each channel is below the value, and its slope."""
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
    below = below + slope * position
    return value[:, None] * (1 - below * saturation[:, None]), below, slope


class _FromHSV(torch.autograd.Function):
    """The gradient of `hsv_to_rgb` in one pass: autograd's takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rgb, below, slope = _from_hsv(x)
        ctx.save_for_backward(x, below, slope)
        return rgb

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _refuse_second_derivative()
        x, below, slope = ctx.saved_tensors
        hue, saturation, value = x.unbind(1)
        of_chroma = -(gradient * below).sum(1)
        of_value = gradient.sum(1) + saturation * of_chroma
        of_position = -(gradient * slope).sum(1) * value * saturation
        of_hue = of_position * soft_modulo_slope(hue / TURN) * (6 / TURN)
        return torch.stack([of_hue, value * of_chroma, of_value], 1)


def jitter_hsv(x: Tensor, factor: Tensor, shift: Tensor, shifted: Tensor) -> Tensor:
    """Scale saturations by [B] and shift hues by [B] radians in one round trip through HSV."""
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    shift, shifted, factor = (each[:, None, None] for each in (shift, shifted, factor))
    shifted = shifted.to(x)
    # Even a shift by 0 changes a hue, so that others skip the soft modulo.
    hue = shifted * (TURN * soft_modulo((hue + shift) / TURN)) + (1 - shifted) * hue
    return hsv_to_rgb(torch.stack([hue, clip(saturation * factor, 0, 1), value], 1))


@dataclass(frozen=True)
class Curve:
    """A power of x + shift beyond a threshold, below it a straight line."""

    threshold: float
    exponent: float
    slope: float
    intercept: float = 0.0
    shift: float = 0.0
    gain: float = 1.0
    drop: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Compute it for each number; it can be differentiated once."""
        return _OnCurve.apply(x, self) if differentiates(x) else self.parts(x)[0]

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the curve, its power and 1 where x is beyond the threshold, else 0."""
        beyond, line = (x > self.threshold).to(x), x * self.slope + self.intercept
        # gain ((x + shift) / (1 + shift))^exponent - drop, or the line slope x + intercept.
        base = (x.clamp_min(self.threshold) + self.shift) / (1 + self.shift)
        power = self.gain * base**self.exponent
        return (power - self.drop) * beyond + line * (1 - beyond), power, beyond


class _OnCurve(torch.autograd.Function):
    """The gradient of a `Curve` without another power."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, curve: Curve) -> Tensor:
        y, power, beyond = curve.parts(x)
        ctx.curve = curve
        ctx.save_for_backward(x, power, beyond)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        x, power, beyond = ctx.saved_tensors
        curve: Curve = ctx.curve
        rise = curve.exponent * power / (x.clamp_min(curve.threshold) + curve.shift)
        return gradient * (rise * beyond + curve.slope * (1 - beyond)), None


# sRGB and CIE L*a*b* with the rounded numbers of kornia and scikit-image
TO_LINEAR = Curve(0.04045, 2.4, 1 / 12.92, shift=0.055)
FROM_LINEAR = Curve(0.0031308, 1 / 2.4, 12.92, gain=1.055, drop=0.055)
TO_ROOT = Curve(0.008856, 1 / 3, 7.787, 4 / 29)
FROM_ROOT = Curve(0.2068966, 3, 1 / 7.787, -4 / 29 / 7.787)


def rgb_to_lab(x: Tensor) -> Tensor:
    """Convert RGB [B, 3, H, W] to CIE L*a*b*, L from 0 to 100; as kornia, a little faster."""
    white = over_pixels(x.new_tensor([WHITE]))
    across, light, deep = TO_ROOT(mix_channels(TO_LINEAR(x), TO_XYZ) / white).unbind(1)
    return torch.stack([116 * light - 16, 500 * (across - light), 200 * (light - deep)], 1)


def lab_to_rgb(x: Tensor) -> Tensor:
    """Convert CIE L*a*b* [B, 3, H, W] to RGB, not clamped."""
    light = (x[:, 0] + 16) / 116
    # Clamped as in kornia and scikit-image.
    across, deep = light + x[:, 1] / 500, (light - x[:, 2] / 200).clamp_min(0)
    white = over_pixels(x.new_tensor([WHITE]))
    xyz = FROM_ROOT(torch.stack([across, light, deep], 1)) * white
    return FROM_LINEAR(mix_channels(xyz, FROM_XYZ))


def mix_channels(x: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiply the channels of each pixel, [B, C, H, W], by a matrix [C, C]."""
    return torch.einsum("ij,bjhw->bihw", x.new_tensor(matrix), x)


def _clamp_except(x: Tensor, unclamped: tuple[int, ...], high: float) -> Tensor:
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
        lab = rgb_to_lab(raised(x, EPS)) + over_pixels(shift)
        return lab_to_rgb(_clamp_except(lab, () if self.released_code else (1, 2), 100))


class XYZ(ColorShift):
    """Shift each of X, Y and Z by at most alpha, in CIE XYZ clamped to [0, 1].

    The clamp, as the authors have it, dims the blue of whites (Z up to 1.089) even without shift.
    """

    span = (1.0, 1.0, 1.0)

    def apply(self, x: Tensor, shift: Tensor) -> Tensor:
        return mix_channels(clip(mix_channels(x, TO_XYZ) + over_pixels(shift), 0, 1), FROM_XYZ)


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
