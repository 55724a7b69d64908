"""The seven noises of `skimage.util.random_noise`, with its defaults."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.noise import poisson_quantile

Kind = Literal["gaussian", "localvar", "poisson", "salt", "pepper", "salt_pepper", "speckle"]


@dataclass(frozen=True)
class Noise(Transform):
    """Noise of independent numbers for each pixel and channel.

    With the defaults of scikit-image, "localvar" (a variance for each pixel) is distributed as
    "gaussian". "poisson" counts as many photons for white as the image has distinct values, the
    next power of two; its noise is drawn for the image that `sample` sees and is then constant.

    Args:
        kind: gaussian, localvar, poisson, salt, pepper, salt_pepper or speckle.
        variance: of the Gaussian numbers that are added (or, speckle, are a share of the pixel).
        amount: share of the pixels that becomes white (salt), black (pepper) or either.
    """

    kind: Kind
    variance: float = 0.01
    amount: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be of {get_args(Kind)}, got {self.kind!r}")

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(gain [B, C, H, W], offset [B, C, H, W] in pixel units)."""
        if self.kind in ("salt", "pepper", "salt_pepper"):
            return self._specks(x, generator)
        one, none = torch.ones_like(x), torch.zeros_like(x)
        if self.kind == "poisson":
            return one, _shot(x.detach(), generator)
        noise = self.variance**0.5 * normal(x, *x.shape[1:], generator=generator)
        return (1 + noise, none) if self.kind == "speckle" else (one, noise)

    def apply(self, x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
        """The gain times the image, plus the offset."""
        return gain * x + offset

    def _specks(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        hit = uniform(x, *x.shape[1:], generator=generator) < self.amount
        white = self.kind == "salt"
        if self.kind == "salt_pepper":
            return (~hit).to(x), (hit & (uniform(x, *x.shape[1:], generator=generator) < 0.5)).to(x)
        return (~hit).to(x), (hit & white).to(x)


def _shot(x: Tensor, generator: Generator) -> Tensor:
    """The noise [B, C, H, W] of counting photons."""
    distinct = torch.tensor([len(image.unique()) for image in x], device=x.device)
    photons = (2 ** distinct.log2().ceil()).to(x)[:, None, None, None]
    u = uniform(x, *x.shape[1:], generator=generator)
    return poisson_quantile(u, x.clamp_min(0) * photons) / photons - x
