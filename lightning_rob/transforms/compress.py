"""Lossy compression: JPEG, fewer levels, fewer frequencies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    Transform,
    between,
    check_range,
    integers,
    over_pixels,
)
from lightning_rob.transforms.jpeg import jpeg
from lightning_rob.transforms.smooth import smooth_round

WORST_QUALITY, QUALITIES, LEVELS = 5, 80, 16


@dataclass(frozen=True)
class JPEG(Transform):
    """JPEG with 4:2:0 chroma, by smooth rounding; one channel is compressed as luma.

    Args:
        alpha: qualities are from 5 to 5 + 80 (1 - alpha), unless there is a range of them.
        released_code: below quality 50, multiply the tables by 2 - 100/q instead of 50/q, as the
            authors' code does by accident (49 is then almost lossless, 10 worse than it should be).
        transposed: exchange horizontal and vertical frequencies in the standard's tables, as the
            code of Shin and Song and of the paper's authors; False is closer to a JPEG file.
        quality: lowest and highest quality, of 1 to 100, in place of alpha.

    Raises:
        ValueError: a range that is empty or out of bounds.
    """

    alpha: float = 0.5
    released_code: bool = False
    transposed: bool = True
    quality: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("quality", self.quality, 1, 100)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(quality [B], of 1 to 100, U(5, 5 + 80 (1 - alpha)) or U of the range, rounded)."""
        by_alpha = (WORST_QUALITY, WORST_QUALITY + QUALITIES * (1 - self.alpha))
        return (between(x, *(self.quality or by_alpha), generator=generator).round(),)

    def apply(self, x: Tensor, quality: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], C = 1 or 3."""
        if x.shape[1] not in (1, 3):
            raise ValueError(f"JPEG needs one or three channels, got {list(x.shape)}")
        return jpeg(x, quality, self.released_code, self.transposed)


@dataclass(frozen=True)
class ColorPrecision(Transform):
    """Round each channel to a few levels, smoothly; the larger alpha, the fewer there may be.

    Args:
        alpha: steps from black to white are from floor(16 (1 - alpha)) + 1 to 16, unless there is a
            range of them.
        steps: fewest and most steps, in place of alpha.

    Raises:
        ValueError: a range that is empty or out of bounds.
    """

    alpha: float = 0.5
    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("steps", self.steps, 1, 255)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(steps [B, C] from black to white, integral, uniform over their range)."""
        by_alpha = (min(int(LEVELS * (1 - self.alpha)) + 1, LEVELS), LEVELS)
        steps = integers(x, *(self.steps or by_alpha), x.shape[1], generator=generator)
        return (steps.to(x),)

    def apply(self, x: Tensor, steps: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]: round~(steps * x) / steps."""
        steps = over_pixels(steps)
        return smooth_round(steps * x) / steps


@dataclass(frozen=True)
class FFT(Transform):
    """Scale the spectrum and drop a share of at most alpha of it.

    On half of the images, by chance, all channels lose the same frequencies.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(gain [B], U(0.98, 1.02); kept [B, C, H, W // 2 + 1] of 0 and 1, over `rfft2`).

        A frequency is dropped with a probability that is U(0, alpha) for the image.
        """
        share = between(x, EPS, max(EPS, self.alpha), 1, 1, 1, generator=generator)
        u = uniform(x, *x.shape[1:3], x.shape[3] // 2 + 1, generator=generator)
        grey = uniform(x, 1, 1, 1, generator=generator) < 0.5
        kept = torch.where(grey, u[:, :1], u) >= share
        return between(x, 0.98, 1.02, generator=generator), kept.to(x)

    def apply(self, x: Tensor, gain: Tensor, kept: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        spectrum = torch.fft.rfft2(x) * (over_pixels(gain) * kept)
        y: Tensor = torch.fft.irfft2(spectrum, s=x.shape[2:])
        return y
