"""Tone: jitter of colours, gamma, sharpness and solarization."""

from dataclasses import dataclass

import torch
from kornia.enhance import solarize
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from lightning_rob.randomness import Generator, uniform
from lightning_rob.transforms.base import EPS, Transform, between, clip, over_pixels, raised
from lightning_rob.transforms.hsv import jittered

DARKEST = 1 / 255


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
        if torch.compiler.is_exporting():  # where no length may hang on values
            return self._masked(x, amount, order)
        rows = torch.arange(len(x), device=x.device)  # x lies as the last turn has sorted it
        for kind in order.unbind(1):
            in_hsv, resorted = (kind[rows] >= 2).sort(stable=True)
            x, rows = x.index_select(0, resorted), rows[resorted]
            first = len(rows) - int(in_hsv.sum())
            own, turn = amount[rows], kind[rows]
            parts = (
                _affine(x[:first], own[:first], turn[:first]),
                _in_hsv(x[first:], own[first:], turn[first:]),
            )
            x = raised(clip(torch.cat(parts), 0, 1), EPS)
        return x.index_select(0, rows.argsort())

    @staticmethod
    def _masked(x: Tensor, amount: Tensor, order: Tensor) -> Tensor:
        for kind in order.unbind(1):
            affine, in_hsv = _affine(x, amount, kind), _in_hsv(x, amount, kind)
            x = raised(clip(torch.where(over_pixels(kind < 2), affine, in_hsv), 0, 1), EPS)
        return x


def _only(amount: Tensor, kind: Tensor, wanted: int, neutral: float) -> Tensor:
    """One of the amounts [B, 4], where it is what kind [B] wants; else what changes nothing."""
    return torch.where(kind == wanted, amount[:, wanted], neutral)


def _affine(x: Tensor, amount: Tensor, kind: Tensor) -> Tensor:
    """With brightness (kind 0) or contrast (kind 1) changed."""
    contrast, brightness = _only(amount, kind, 1, 1), _only(amount, kind, 0, 0)
    return x * over_pixels(contrast) + over_pixels(brightness)


def _in_hsv(x: Tensor, amount: Tensor, kind: Tensor) -> Tensor:
    """With saturation (kind 2) or hue (kind 3) changed."""
    return jittered(x, _only(amount, kind, 2, 1), amount[:, 3], kind == 3)


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
