"""Augmentations of Kornia as transforms whose randomness is an argument."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_rob.randomness import Generator, derive_seed, own_streams, uniform
from lightning_rob.transforms.base import Transform

PROBES = 100  # seeds tried until an augmentation of small probability changes an image


@dataclass(frozen=True)
class FromKornia(Transform):
    """An augmentation of `kornia.augmentation`, with its own parameters for each image.

    `RandomTransforms` makes it of a Kornia module by itself. Each image is augmented on its own, by
    a seed from its own stream: Kornia draws some parameters once for a batch, and the result would
    depend on the other images. The augmentation's own probability, `augmentation.p`, is a part of
    it, beside `p` here.

    Args:
        augmentation: a module that takes images [1, C, H, W] in [0, 1] and keeps their size.
    """

    augmentation: nn.Module

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self.augmentation)
        if any(base.__name__.startswith("MixAugmentation") for base in kind.__mro__):
            raise ValueError(
                f"{kind.__name__} mixes images of a batch, and a defense predicts each by itself"
            )
        if not any(base.__module__.startswith("kornia.augmentation.") for base in kind.__mro__):
            raise TypeError(
                "transforms are those of lightning_rob.transforms and kornia.augmentation, got "
                f"{kind.__name__}"
            )

    @property
    def class_name(self) -> str:
        """The augmentation's own name."""
        return type(self.augmentation).__name__

    @cached_property
    def differentiable(self) -> bool:  # type: ignore[override]
        """Whether a gradient reaches the image, found out on an image of noise."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(1, 3, 32, 32, generator=generator)
        with own_streams(0):
            y = self.augmentation(x)
        if isinstance(y, Tensor) and y.dim() == 4:  # it may be made for images of one size
            x = torch.rand(y.shape, generator=generator)
        weights = torch.rand(x.shape, generator=generator)
        with torch.inference_mode(False), torch.enable_grad():
            for seed in range(PROBES):
                z = x.clone().requires_grad_()
                y = self._augmented(z, seed)
                if not torch.equal(y, x):
                    break
            if not y.requires_grad:
                return False
            (gradient,) = torch.autograd.grad((weights * y).sum(), z)
        return bool(gradient.isfinite().all() and gradient.any())

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """(seed [B] int64 of each image's augmentation)."""
        # Two numbers of 24 bits make a seed of 48.
        digits = (uniform(x.float(), 2, generator=generator) * 2**24).long()
        return (digits[:, 0] * 2**24 + digits[:, 1],)

    def apply(self, x: Tensor, seeds: Tensor) -> Tensor:
        images = zip(torch.split(x, 1), seeds.tolist(), strict=True)
        return torch.cat([self._augmented(image, seed) for image, seed in images])

    def _augmented(self, x: Tensor, seed: int) -> Tensor:
        with own_streams(derive_seed(seed), x.device):
            y = self.augmentation(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"{self.class_name} must keep the size of images, {list(x.shape)}: {found}"
            )
        return y
