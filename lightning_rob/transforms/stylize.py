"""Tone: color jitter, gamma, sharpness and solarization."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import (
    EPS,
    AlphaTransform,
    Transform,
    between,
    clip,
    over_pixels,
    raised,
)
from lightning_rob.transforms.color import jitter_hsv

DARKEST = 1 / 255


class ColorJitter(AlphaTransform):
    """Change brightness, contrast, saturation and hue in random order.

    Brightness is added, contrast multiplied without a mean, saturation and hue are those of
    `rgb_to_hsv`. The authors' code also adds noise of 1e-5 with the brightness; there is none here.
    """

    channels = (3,)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(amount [B, 4], order [B, 4] int64).

        Amounts: shift of the brightness, U(-alpha, alpha) in pixel units, factors of contrast and
        saturation, U(1 - alpha, 1 + alpha), and shift of the hue, U(-alpha, alpha) in radians. The
        order is a permutation: which of the four comes first, second, third and last.
        """
        off = between(x, -self.alpha, self.alpha, 4, generator=generator)
        return off + off.new_tensor([0, 1, 1, 0]), uniform(x, 4, generator=generator).argsort(1)

    def apply(self, x: Tensor, amount: Tensor, order: Tensor) -> Tensor:
        x = raised(x, EPS)
        brightness, contrast, saturation, hue = amount.unbind(1)
        for kind in order.unbind(1):
            factor = over_pixels(torch.where(kind == 1, contrast, 1))
            affine = x * factor + over_pixels(torch.where(kind == 0, brightness, 0))
            in_hsv = jitter_hsv(x, torch.where(kind == 2, saturation, 1), hue, kind == 3)
            x = raised(clip(torch.where(over_pixels(kind < 2), affine, in_hsv), 0, 1), EPS)
        return x


class Gamma(AlphaTransform):
    """Raise to a power near one.

    The slope at black would be 0 or infinite; the one of the next darkest of 256 greys replaces it.
    """

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(gamma [B], U(1 - alpha, 1 + alpha), at least 1e-9)."""
        gamma = between(x, 1 - self.alpha, 1 + self.alpha, generator=generator)
        return (gamma.clamp_min(EPS),)

    def apply(self, x: Tensor, gamma: Tensor) -> Tensor:
        gamma, black = over_pixels(gamma), x.detach() <= EPS
        slope = gamma * DARKEST ** (gamma - 1)
        rising = EPS**gamma + slope * (x - x.detach())
        return torch.where(black, rising, torch.where(black, DARKEST, x) ** gamma)


class Sharpen(AlphaTransform):
    """Move away from, or towards, a 3x3 blur (centre 5/13, others 1/13; none at the border).

    As Pillow's `ImageEnhance.Sharpness`. kornia's `sharpness` is the same, but for the slope of its
    clamp at black and white; see `lightning_rob.transforms.base.clip`. Factors span 20 alpha orders
    of magnitude: 10^-5 to 10^5 at alpha 0.5.
    """

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(factor [B], 10^(10 U(-alpha, alpha)); 0 is the blur, 1 the image)."""
        return (10 ** (10 * between(x, -self.alpha, self.alpha, generator=generator)),)

    def apply(self, x: Tensor, factor: Tensor) -> Tensor:
        detail = x[..., 1:-1, 1:-1] - avg_pool2d(x, 3, stride=1)
        return x + (over_pixels(factor) - 1) * (9 / 13) * pad(detail, [1] * 4)


class Solarize(Transform):
    """Shift the brightness a little, then invert pixels that are brighter than about a half."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(threshold [B], U(0.4, 0.6); addition [B], U(-0.1, 0.1); both in pixel units)."""
        threshold = between(x, 0.4, 0.6, generator=generator)
        return threshold, between(x, -0.1, 0.1, generator=generator)

    def apply(self, x: Tensor, threshold: Tensor, addition: Tensor) -> Tensor:
        shifted = (x + over_pixels(addition)).clamp(0, 1)
        bright = (shifted >= over_pixels(threshold)).to(x)
        return shifted * (1 - 2 * bright) + bright
