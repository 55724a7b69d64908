"""Noise, and pixels set to white or black."""

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.transforms.base import EPS, AlphaTransform, between, over_pixels

MIN_PHOTON = 1e-3  # the paper's smallest alpha
LARGE_PHOTON = 0.25  # from this value of a photon on, few are counted: sum the probabilities
BOX_AREA = 0.02
BOX_RATIO = 0.3


def share_channels(noise: Tensor, generator: Generator) -> Tensor:
    """Give all channels of an image the noise of the first one, with probability 1/2."""
    grey = (uniform(noise, 1, 1, 1, generator=generator) < 0.5).to(noise)
    return noise * (1 - grey) + noise[:, :1] * grey  # exact, and faster than `torch.where`


class AdditiveNoise(AlphaTransform):
    """Noise that is added to the image."""

    def apply(self, x: Tensor, noise: Tensor) -> Tensor:
        return x + noise


class GaussianNoise(AdditiveNoise):
    """Add normal noise of standard deviation alpha, in pixel units.

    With probability 1/2 per image, all channels of a pixel get the same noise.
    """

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, N(0, alpha^2))."""
        noise = self.alpha * normal(x, *x.shape[1:], generator=generator)
        return (share_channels(noise, generator),)


class UniformNoise(AdditiveNoise):
    """Add uniform noise of at most alpha, in pixel units; channels as in `GaussianNoise`."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, U(-alpha, alpha))."""
        noise = between(x, -self.alpha, self.alpha, *x.shape[1:], generator=generator)
        return (share_channels(noise, generator),)


class SpeckleNoise(AlphaTransform):
    """Multiply by normal noise of mean 1 and deviation alpha; channels as in `GaussianNoise`."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(factor [B, C, H, W], N(1, alpha^2))."""
        noise = self.alpha * normal(x, *x.shape[1:], generator=generator)
        return (1 + share_channels(noise, generator),)

    def apply(self, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor


class PoissonNoise(AdditiveNoise):
    """Count photons, each worth alpha in pixel units: alpha * Poisson(x / alpha).

    The noise is drawn for the image that `sample` sees and is then a constant: the gradient is the
    identity, the straight-through estimate of the paper. Alpha is at least 0.001.
    """

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(noise [B, C, H, W] in pixel units, alpha * Poisson(x / alpha) - x)."""
        photon = max(self.alpha, MIN_PHOTON)
        u = uniform(x, *x.shape[1:], generator=generator)
        clean = x.detach()
        rate = clean.clamp_min(0) / photon
        few = photon >= LARGE_PHOTON
        count = summed_poisson_quantile(u, rate, 1 / photon) if few else poisson_quantile(u, rate)
        return (photon * count - clean,)


def summed_poisson_quantile(u: Tensor, rate: Tensor, max_rate: float) -> Tensor:
    """Compute `poisson_quantile` by summing the probabilities: faster where rates are small."""
    dtype, rate = u.dtype, rate.double()  # in single precision rounding would hide the tail
    u = u.to(rate).clamp(2.0**-25, 1 - 2.0**-24)
    # Before step k of the loop `term` is P(count = k - 1), and `below` P(count < k).
    term = (-rate).exp()
    below, count = term.clone(), torch.zeros_like(rate, dtype=torch.float32)
    # at rates up to 4, counts beyond the last term have a probability below 2^-25
    for k in range(1, 7 + int(4 * max_rate)):
        count += (below < u).to(count)
        term.mul_(rate).mul_(1 / k)
        below += term
    return count.to(dtype)


def poisson_quantile(u: Tensor, rate: Tensor) -> Tensor:
    """Compute the smallest count k with P(Poisson(rate) <= k) >= u, for rates from 0 to 1000."""
    dtype, rate = u.dtype, rate.to(torch.promote_types(u.dtype, torch.float32))
    u = u.to(rate).clamp(2.0**-25, 1 - 2.0**-24)
    # The expansion of Cornish and Fisher (1938) is off by one at most for these rates; its second
    # term fades out where the rate is small.
    z = torch.special.ndtri(u)
    guess = rate + z * rate.sqrt() + (z * z - 1) / 6 * rate / (rate + 0.03)
    count = (guess - 0.5).ceil().clamp_min(0)
    # One step up or down leads to the exact count.
    count = count + (torch.special.gammaincc(count + 1, rate) < u).to(u)
    fewer = torch.special.gammaincc(count.clamp_min(1), rate) >= u
    exact: Tensor = count - (fewer & (count > 0)).to(u)
    return exact.to(dtype)


class Specks(AlphaTransform):
    """Pixels set to one value; channels as in `GaussianNoise`."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(mask [B, C, H, W] of 0 and 1, ones with a probability per image of U(0, alpha))."""
        probability = between(x, 0, self.alpha, 1, 1, 1, generator=generator)
        u = share_channels(uniform(x, *x.shape[1:], generator=generator), generator)
        return ((u < probability).to(x),)


class Salt(Specks):
    """Set a share of at most alpha of the pixels to white, to which the sum is clamped."""

    def apply(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask


class Pepper(Specks):
    """Set a share of at most alpha of the pixels to black, to which the difference is clamped."""

    def apply(self, x: Tensor, mask: Tensor) -> Tensor:
        return x - mask


class Erase(AlphaTransform):
    """Blacken a rectangle (Zhong et al. 2020) of at most a share max(0.02, alpha) of the image."""

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(box [B, 4] int64: top, left, height, width in pixels, within the image)."""
        rows, columns = x.shape[2:]
        u = uniform(x, 5, generator=generator)
        # The area is a share U(0.02, max(0.02, alpha)) of the image, the ratio of height to width
        # U(0.3, 1) or, as often, U(1, 1 / 0.3).
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
        top, left, height, width = (over_pixels(side) for side in box.unbind(1))
        row = torch.arange(x.shape[2], device=x.device)[:, None]
        column = torch.arange(x.shape[3], device=x.device)
        inside = (row >= top) & (row < top + height) & (column >= left) & (column < left + width)
        return x * (~inside).to(x)
