"""Noise, and pixels set to white or black."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.transforms.base import EPS, Transform, between, over_pixels

MIN_PHOTON = 1e-3  # the paper's smallest alpha
LARGE_PHOTON = 0.25  # from this value of a photon on, few are counted: sum the probabilities
BOX_AREA = 0.02
BOX_RATIO = 0.3


def share_channels(noise: Tensor, generator: Generator) -> Tensor:
    """Give all channels of an image the noise of the first one, with probability 1/2."""
    grey = (uniform(noise, 1, 1, 1, generator=generator) < 0.5).to(noise)
    return noise * (1 - grey) + noise[:, :1] * grey  # exact, and faster than `torch.where`


def _sample_mask(x: Tensor, alpha: float, generator: Generator) -> Tensor:
    """[B, C, H, W] of 0 and 1, ones with a probability per image that is uniform in [0, alpha)."""
    probability = between(x, 0, alpha, 1, 1, 1, generator=generator)
    u = share_channels(uniform(x, *x.shape[1:], generator=generator), generator)
    return (u < probability).to(x)


@dataclass(frozen=True)
class GaussianNoise(Transform):
    """Add normal noise of standard deviation alpha, in pixel units.

    With probability 1/2 per image, all channels of a pixel get the same noise.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, N(0, alpha^2))."""
        noise = self.alpha * normal(x, *x.shape[1:], generator=generator)
        return (share_channels(noise, generator),)

    def apply(self, x: Tensor, noise: Tensor) -> Tensor:
        """Add the noise."""
        return x + noise


@dataclass(frozen=True)
class UniformNoise(Transform):
    """Add uniform noise of at most alpha, in pixel units; channels as in `GaussianNoise`."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, U(-alpha, alpha))."""
        noise = between(x, -self.alpha, self.alpha, *x.shape[1:], generator=generator)
        return (share_channels(noise, generator),)

    def apply(self, x: Tensor, noise: Tensor) -> Tensor:
        """Add the noise."""
        return x + noise


@dataclass(frozen=True)
class SpeckleNoise(Transform):
    """Multiply by normal noise of mean 1 and deviation alpha; channels as in `GaussianNoise`."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(factor [B, C, H, W], N(1, alpha^2))."""
        noise = self.alpha * normal(x, *x.shape[1:], generator=generator)
        return (1 + share_channels(noise, generator),)

    def apply(self, x: Tensor, factor: Tensor) -> Tensor:
        """Multiply by the factor."""
        return x * factor


@dataclass(frozen=True)
class PoissonNoise(Transform):
    """Count photons, each worth alpha in pixel units: alpha * Poisson(x / alpha).

    The noise is drawn for the image that `sample` sees and is then a constant: the gradient is the
    identity, the straight-through estimate of the paper. Alpha is at least 0.001.
    """

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, alpha * Poisson(x / alpha) - x)."""
        photon = max(self.alpha, MIN_PHOTON)
        u = uniform(x, *x.shape[1:], generator=generator)
        clean = x.detach()
        rate = clean.clamp_min(0) / photon
        if photon >= LARGE_PHOTON:
            count = summed_poisson_quantile(u, rate, 1 / photon)
        else:
            count = poisson_quantile(u, rate)
        return (photon * count - clean,)

    def apply(self, x: Tensor, noise: Tensor) -> Tensor:
        """Add the noise."""
        return x + noise


def summed_poisson_quantile(u: Tensor, rate: Tensor, max_rate: float) -> Tensor:
    """Compute `poisson_quantile` by summing the probabilities: faster for small rates.

    Args:
        u: any shape, in [0, 1).
        rate: same shape, mean count, from 0 to max_rate.
        max_rate: determines the number of terms.

    Returns:
        Same shape, of u's dtype, integral.
    """
    dtype, rate = u.dtype, rate.double()  # in single precision rounding would hide the tail
    u = u.to(rate).clamp(2.0**-25, 1 - 2.0**-24)
    term = (-rate).exp()
    below, count = term.clone(), torch.zeros_like(rate, dtype=torch.float32)
    # at rates up to 4, counts beyond the last term have a probability below 2^-25
    for k in range(1, 7 + int(4 * max_rate)):
        count += (below < u).to(count)
        term.mul_(rate).mul_(1 / k)
        below += term
    return count.to(dtype)


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """Compute the smallest count k with P(Poisson(rate) <= k) >= u.

    The expansion of Cornish and Fisher (1938) is off by one at most for these rates (its second
    term fades out where the rate is small); one step up or down leads to the exact count.

    Args:
        u: any shape, in [0, 1).
        rate: same shape, mean count, from 0 to 1000.

    Returns:
        Same shape, of u's dtype, integral.
    """
    dtype, rate = u.dtype, rate.to(torch.promote_types(u.dtype, torch.float32))
    u = u.to(rate).clamp(2.0**-25, 1 - 2.0**-24)
    z = torch.special.ndtri(u)
    guess = rate + z * rate.sqrt() + (z * z - 1) / 6 * rate / (rate + 0.03)
    count = (guess - 0.5).ceil().clamp_min(0)
    count = count + (torch.special.gammaincc(count + 1, rate) < u).to(u)
    fewer = torch.special.gammaincc(count.clamp_min(1), rate) >= u
    exact: Tensor = count - (fewer & (count > 0)).to(u)
    return exact.to(dtype)


@dataclass(frozen=True)
class Salt(Transform):
    """Set a share of at most alpha of the pixels to white; channels as in `GaussianNoise`."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(mask [B, C, H, W] of 0 and 1, ones with a probability per image of U(0, alpha))."""
        return (_sample_mask(x, self.alpha, generator),)

    def apply(self, x: Tensor, mask: Tensor) -> Tensor:
        """Add the mask; the caller clamps to white."""
        return x + mask


@dataclass(frozen=True)
class Pepper(Transform):
    """Set a share of at most alpha of the pixels to black; channels as in `GaussianNoise`."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(mask [B, C, H, W] of 0 and 1, ones with a probability per image of U(0, alpha))."""
        return (_sample_mask(x, self.alpha, generator),)

    def apply(self, x: Tensor, mask: Tensor) -> Tensor:
        """Subtract the mask; the caller clamps to black."""
        return x - mask


@dataclass(frozen=True)
class Erase(Transform):
    """Blacken a rectangle (Zhong et al. 2020) of at most a share alpha of the image."""

    alpha: float = 0.5

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(box [B, 4] int64: top, left, height, width in pixels, within the image).

        The area is a share U(0.02, max(0.02, alpha)) of the image, the ratio of height to width
        U(0.3, 1) or, as often, U(1, 1 / 0.3).
        """
        rows, columns = x.shape[2:]
        u = uniform(x, 5, generator=generator)
        share = BOX_AREA + (max(BOX_AREA + EPS, self.alpha) - BOX_AREA) * u[:, 0]
        flat, tall = BOX_RATIO + (1 - BOX_RATIO) * u[:, 1], 1 + (1 / BOX_RATIO - 1) * u[:, 1]
        ratio = torch.where(u[:, 4] < 0.5, flat, tall)
        area = share * rows * columns
        height = (area * ratio).sqrt().round().clamp(1, rows)
        width = (area / ratio).sqrt().round().clamp(1, columns)
        top = (u[:, 2] * (rows - height + 1)).floor()
        left = (u[:, 3] * (columns - width + 1)).floor()
        return (torch.stack([top, left, height, width], 1).long(),)

    def apply(self, x: Tensor, box: Tensor) -> Tensor:
        """Set the pixels of the box to zero."""
        top, left, height, width = (over_pixels(side) for side in box.unbind(1))
        row = torch.arange(x.shape[2], device=x.device)[:, None]
        column = torch.arange(x.shape[3], device=x.device)
        inside = (row >= top) & (row < top + height) & (column >= left) & (column < left + width)
        return x * (~inside).to(x)
