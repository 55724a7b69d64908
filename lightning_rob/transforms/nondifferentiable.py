"""Transforms without a gradient, which an attack has to approximate (BPDA, RT paper section 4).

They refuse images that require a gradient, so that no attack mistakes a missing gradient for
robustness. The ranges are those of the paper's study of BaRT (Raff et al. 2019).
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from skimage import exposure, restoration
from torch import Tensor

from lightning_rob.randomness import Generator
from lightning_rob.transforms.base import (
    EPS,
    NumpyImage,
    NumpyTransform,
    Transform,
    between,
    integers,
    over_pixels,
)


@dataclass(frozen=True)
class AdaptiveHistogram(NumpyTransform):
    """Equalize the histogram of each channel and region, with limited contrast (CLAHE).

    Args:
        clip: lowest and highest clip limit, as `skimage.exposure.equalize_adapthist` has it.
        regions: number along each side. A limit counts pixels: in regions of less than 1 / clip
            pixels, such as 8 along a side of 32 pixels, all limits are one.
    """

    clip: tuple[float, float] = (0.01, 0.04)
    regions: int = 8
    limits = (("clip", 0, 1), ("regions", 1, inf))

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(clip [B], a share of the contrast, uniform in the range)."""
        return (between(x, *self.clip, generator=generator),)

    def transform_image(self, image: NumpyImage, limit: float) -> NumpyImage:
        image = image.clip(0, 1)
        sides = [max(side // self.regions, 1) for side in image.shape[1:]]
        return np.stack([exposure.equalize_adapthist(plane, sides, limit) for plane in image])


@dataclass(frozen=True)
class EqualizeHistogram(NumpyTransform):
    """Equalize the histogram of each channel.

    Args:
        bins: fewest and most bins.
    """

    bins: tuple[int, int] = (40, 256)
    limits = (("bins", 1, inf),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(bins [B] int64, uniform in the range)."""
        return (integers(x, *self.bins, generator=generator),)

    def transform_image(self, image: NumpyImage, bins: int) -> NumpyImage:
        return np.stack([exposure.equalize_hist(plane, int(bins)) for plane in image])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class ContrastStretch(Transform):
    """Stretch the range between two percentiles of an image, all channels alike, to [0, 1].

    A constant image stays.

    Args:
        tail: largest share of the pixels that becomes black, and largest that becomes white.
    """

    tail: float = 0.04
    differentiable = False
    limits = (("tail", 0, 0.5),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(black [B], white [B]: shares of the pixels, U(0, tail))."""
        black = between(x, 0, self.tail, generator=generator)
        return black, between(x, 0, self.tail, generator=generator)

    def apply(self, x: Tensor, black: Tensor, white: Tensor) -> Tensor:
        # By sorting, as `torch.quantile` takes one percentile for all images.
        ranked = x.detach().flatten(1).sort(1).values
        last = ranked.shape[1] - 1
        low = ranked.gather(1, (black * last).round().long()[:, None])
        high = ranked.gather(1, ((1 - white) * last).round().long()[:, None])
        low, high = low[..., None, None], high[..., None, None]
        return torch.where(high > low, (x - low) / (high - low), x)


@dataclass(frozen=True)
class ChambolleDenoise(NumpyTransform):
    """Denoise by total variation (Chambolle 2004).

    Args:
        weight: lowest and highest weight, as `skimage.restoration.denoise_tv_chambolle` has it.
    """

    weight: tuple[float, float] = (0.6, 1.15)
    limits = (("weight", EPS, inf),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(weight [B], uniform in the range; the larger, the smoother)."""
        return (between(x, *self.weight, generator=generator),)

    def transform_image(self, image: NumpyImage, weight: float) -> NumpyImage:
        return restoration.denoise_tv_chambolle(image, weight, channel_axis=0)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class HardPrecision(Transform):
    """Round each channel to a few levels; `ColorPrecision` does so with a slope.

    Args:
        steps: fewest and most steps from black to white.
    """

    steps: tuple[int, int] = (8, 200)
    differentiable = False
    limits = (("steps", 1, inf),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(steps [B, C], integral, uniform in the range)."""
        return (integers(x, *self.steps, x.shape[1], generator=generator).to(x),)

    def apply(self, x: Tensor, steps: Tensor) -> Tensor:
        steps = over_pixels(steps)
        return (steps * x).round() / steps


ALL: tuple[type[Transform], ...] = (
    AdaptiveHistogram,
    EqualizeHistogram,
    ContrastStretch,
    ChambolleDenoise,
    HardPrecision,
)
