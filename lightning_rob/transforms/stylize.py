"""Tone: jitter of colours, gamma, sharpness and solarization."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kornia.enhance import solarize
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import EPS, Transform, between, clip, over_pixels, raised
from lightning_rob.transforms.hsv import scale_saturation, shift_hue


def _brighten(x: Tensor, shift: Tensor) -> Tensor:
    return x + over_pixels(shift)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    return x * over_pixels(factor)


DARKEST = 1 / 255

STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _brighten,
    _contrast,
    scale_saturation,
    shift_hue,
)


@dataclass(frozen=True)
class ColorJitter(Transform):
    """Change brightness, contrast, saturation and hue in random order.

    Brightness is added, contrast multiplied without a mean, saturation and hue are those of the
    smooth HSV. The authors' code also adds noise of 1e-5 with the brightness; there is none here.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(amount [B, 4], order [B, 4] int64).

        Amounts: of brightness, U(-alpha, alpha) in pixel units, factors of contrast and saturation,
        U(1 - alpha, 1 + alpha), and turn of the hue, U(-alpha, alpha) in radians. The order is a
        permutation: which of the four comes first, second, third and last.
        """
        off = between(x, -self.alpha, self.alpha, 4, generator=generator)
        return off + off.new_tensor([0, 1, 1, 0]), uniform(x, 4, generator=generator).argsort(1)

    def apply(self, x: Tensor, amount: Tensor, order: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, 3, H, W]."""
        self._need_rgb(x)
        x = raised(x, EPS)
        for turn in order.unbind(1):
            for kind, step in enumerate(STEPS):
                if torch.compiler.is_exporting():  # where no length may hang on values
                    changed = raised(clip(step(x, amount[:, kind]), 0, 1), EPS)
                    x = torch.where(over_pixels(turn == kind), changed, x)
                    continue
                (chosen,) = torch.where(turn == kind)
                if len(chosen):
                    changed = step(x[chosen], amount[chosen, kind])
                    x = x.index_copy(0, chosen, raised(clip(changed, 0, 1), EPS))
        return x


@dataclass(frozen=True)
class Gamma(Transform):
    """Raise to a power near one.

    The slope at black, which is 0 or infinite, is that of the next darkest of 256 greys.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(gamma [B], U(1 - alpha, 1 + alpha), at least 1e-9)."""
        gamma = between(x, 1 - self.alpha, 1 + self.alpha, generator=generator)
        return (gamma.clamp_min(EPS),)

    def apply(self, x: Tensor, gamma: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        gamma, black = over_pixels(gamma), x.detach() <= EPS
        slope = gamma * DARKEST ** (gamma - 1)
        rising = EPS**gamma + slope * (x - x.detach())
        return torch.where(black, rising, torch.where(black, DARKEST, x) ** gamma)


@dataclass(frozen=True)
class Sharpen(Transform):
    """Move away from, or towards, a 3x3 blur (centre 5/13, others 1/13; none at the border).

    As Pillow's `ImageEnhance.Sharpness`. kornia's `sharpness` is the same, but for the slope of its
    clamp at black and white; see `lightning_rob.transforms.base.clip`.

    Factors span 20 alpha orders of magnitude: 10^-5 to 10^5 at alpha 0.5.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(factor [B], 10^(10 U(-alpha, alpha)); 0 is the blur, 1 the image)."""
        return (10 ** (10 * between(x, -self.alpha, self.alpha, generator=generator)),)

    def apply(self, x: Tensor, factor: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        detail = x[..., 1:-1, 1:-1] - avg_pool2d(x, 3, stride=1)
        return x + (over_pixels(factor) - 1) * (9 / 13) * pad(detail, [1] * 4)


@dataclass(frozen=True)
class Solarize(Transform):
    """Shift the brightness a little, then invert what is brighter than about a half."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(threshold [B], U(0.4, 0.6); addition [B], U(-0.1, 0.1); both in pixel units)."""
        threshold = between(x, 0.4, 0.6, generator=generator)
        return threshold, between(x, -0.1, 0.1, generator=generator)

    def apply(self, x: Tensor, threshold: Tensor, addition: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return solarize(x, threshold, addition)
