"""Lossy compression: JPEG (Shin and Song 2017), fewer levels, fewer frequencies."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    AlphaTransform,
    between,
    integers,
    over_pixels,
    soft_round,
)
from lightning_rob.transforms.color import mix_channels
from lightning_rob.transforms.noise import share_channels

MIN_QUALITY, QUALITY_RANGE, LEVELS = 5, 80, 16

# ITU-T T.81, tables K.1 and K.2; the rows are vertical frequencies
LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
FROM_YCBCR = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))
WHITE, LUMA_OFFSET, MIN_FACTOR = 255, 128, 0.01


@dataclass(frozen=True)
class JPEG(AlphaTransform):
    """Compress as JPEG with 4:2:0 chroma, by soft rounding; one channel is compressed as luma.

    Args:
        alpha: qualities are from 5 to 5 + 80 (1 - alpha), unless there is a range of them.
        released_code: below quality 50, multiply the tables by 2 - 100/q instead of 50/q, as the
            authors' code does by accident (49 is then almost lossless, 10 worse than it should be).
        transposed: exchange horizontal and vertical frequencies in the standard's tables, as the
            code of Shin and Song and of the paper's authors; False is closer to a JPEG file.
        quality: lowest and highest quality, of 1 to 100, in place of alpha.
    """

    released_code: bool = False
    transposed: bool = True
    quality: tuple[float, float] | None = None
    channels = (1, 3)
    limits = (("quality", 1, 100),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(quality [B], of 1 to 100, U(5, 5 + 80 (1 - alpha)) or U of the range, rounded)."""
        by_alpha = (MIN_QUALITY, MIN_QUALITY + QUALITY_RANGE * (1 - self.alpha))
        return (between(x, *(self.quality or by_alpha), generator=generator).round(),)

    def apply(self, x: Tensor, quality: Tensor) -> Tensor:
        return jpeg(x, quality, self.released_code, self.transposed)


@dataclass(frozen=True)
class ColorPrecision(AlphaTransform):
    """Round each channel to a few levels, softly; the larger alpha, the fewer there may be.

    Args:
        alpha: steps from black to white are from floor(16 (1 - alpha)) + 1 to 16, unless there is a
            range of them.
        steps: fewest and most steps, in place of alpha.
    """

    steps: tuple[int, int] | None = None
    limits = (("steps", 1, 255),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(steps [B, C] from black to white, integral, uniform over their range)."""
        by_alpha = (min(int(LEVELS * (1 - self.alpha)) + 1, LEVELS), LEVELS)
        steps = integers(x, *(self.steps or by_alpha), x.shape[1], generator=generator)
        return (steps.to(x),)

    def apply(self, x: Tensor, steps: Tensor) -> Tensor:
        steps = over_pixels(steps)
        return soft_round(steps * x) / steps


class FFT(AlphaTransform):
    """Scale the spectrum and drop a share of at most alpha of it.

    With probability 1/2 per image, all channels lose the same frequencies.
    """

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(gain [B], U(0.98, 1.02); kept [B, C, H, W // 2 + 1] of 0 and 1, over `rfft2`).

        A frequency is dropped with a probability that is U(0, alpha) for the image.
        """
        share = between(x, EPS, max(EPS, self.alpha), 1, 1, 1, generator=generator)
        u = uniform(x, *x.shape[1:3], x.shape[3] // 2 + 1, generator=generator)
        kept = share_channels(u, generator) >= share
        return between(x, 0.98, 1.02, generator=generator), kept.to(x)

    def apply(self, x: Tensor, gain: Tensor, kept: Tensor) -> Tensor:
        # Half of the spectrum suffices: that of a real image is symmetric.
        wide = x.float() if x.itemsize < 4 else x  # halves have no transform on CPUs
        spectrum = torch.fft.rfft2(wide) * (over_pixels(gain) * kept)
        return torch.fft.irfft2(spectrum, s=x.shape[2:]).to(x)


def jpeg(
    x: Tensor, quality: Tensor, released_code: bool = False, transposed: bool = True
) -> Tensor:
    """Compress images of one or three channels by qualities [B] with a gradient; not clamped."""
    height, width = x.shape[2:]
    padded = pad(x, [0, -width % 16, 0, -height % 16], mode="replicate") * WHITE
    # At quality 100 the factor is 0, which would divide; the released one is negative below 50.
    factor = table_factor(quality, released_code).abs().clamp_min(MIN_FACTOR)[:, None, None]
    tables = x.new_tensor([LUMA, CHROMA])
    luma, chroma = (factor * t for t in (tables.mT if transposed else tables))
    if x.shape[1] == 1:
        decoded = quantize_dct(padded - LUMA_OFFSET, luma) + LUMA_OFFSET
    else:
        # only luma is offset by 128: without the offset that files give chroma, zero is its middle
        ycc = mix_channels(padded, TO_YCBCR)
        halved = quantize_dct(avg_pool2d(ycc[:, 1:], 2), chroma)
        full = interpolate(halved, scale_factor=2, mode="nearest")
        light = quantize_dct(ycc[:, :1] - LUMA_OFFSET, luma) + LUMA_OFFSET
        decoded = mix_channels(torch.cat([light, full], 1), FROM_YCBCR)
    return decoded[..., :height, :width] / WHITE


def table_factor(quality: Tensor, released_code: bool = False) -> Tensor:
    """Compute the factor of the standard tables at a quality from 1 to 100; [B] -> [B]."""
    # As in libjpeg 5000 / q percent below quality 50, and 200 - 2q from there on. The authors' code
    # puts the result of the first formula into the second.
    coarse = 50 / quality
    return torch.where(quality < 50, 2 - 2 * coarse if released_code else coarse, 2 - quality / 50)


def quantize_dct(plane: Tensor, table: Tensor) -> Tensor:
    """Round the DCT coefficients of planes [B, C, 8h, 8w] softly to multiples of [B, 8, 8]."""
    count, channels, height, width = plane.shape
    blocks = plane.view(count, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    dct, steps = dct_matrix().to(plane), table[:, None, None, None]
    coefficients = soft_round(dct @ blocks @ dct.T / steps) * steps
    return (dct.T @ coefficients @ dct).transpose(3, 4).reshape(plane.shape)


@cache
def dct_matrix() -> Tensor:
    """[frequency, position] of the orthonormal 8-point DCT, float64 on the CPU."""
    with torch.inference_mode(False):
        place = torch.arange(8, dtype=torch.float64)
        waves = torch.cos(place[:, None] * (2 * place + 1) * math.pi / 16) / 2
        return torch.cat([waves[:1] / math.sqrt(2), waves[1:]])
