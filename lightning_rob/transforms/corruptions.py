"""Corruptions of images at five severities (Hendrycks and Dietterich 2019)."""

import inspect
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_rob.randomness import Generator
from lightning_rob.transforms.base import Transform, integers

OFFSETS = (0.05, 0.1, 0.15, 0.2, 0.3)  # CIFAR-10-C adds them to the value, at severities 1 … 5
LARGEST_SEED = 2**24 - 1  # float32 represents all integers up to here


@dataclass(frozen=True)
class Brightness(Transform):
    """Raise the value of HSV, or grey, as CIFAR-10-C does: hue and saturation stay."""

    severity: int = 1
    limits = (("severity", 1, 5),)

    def apply(self, x: Tensor) -> Tensor:
        value = x.amax(1, keepdim=True)
        lighter = (value + OFFSETS[self.severity - 1]).clamp_max(1)
        black = value == 0  # has neither hue nor saturation
        return torch.where(black, lighter, x * (lighter / torch.where(black, 1, value)))


@dataclass(frozen=True)
class Corruption(Transform):
    """Apply a corruption of ImageNet-C by its name, from the package imagecorruptions-imaug.

    The severities are those for photographs: on images of 32x32 they are harder than CIFAR-10-C's.
    A corruption rounds to 8-bit colours, has no gradient, and is for images from 32x32.

    Args:
        name: gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur,
            zoom_blur, snow, frost, fog, brightness, contrast, elastic_transform, pixelate,
            jpeg_compression, speckle_noise, gaussian_blur, spatter or saturate.
        severity: 1 … 5.
    """

    name: str
    severity: int = 1
    differentiable = False
    limits = (("severity", 1, 5),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(seed [B] int64 of the randomness in the corruption)."""
        return (integers(x.float(), 0, LARGEST_SEED - 1, generator=generator),)

    def apply(self, x: Tensor, seed: Tensor) -> Tensor:
        if min(x.shape[2:]) < 32:
            raise ValueError(f"{self.name} is for images from 32x32, got {list(x.shape)}")
        try:
            from imagecorruptions import corruption_dict as known
        except ImportError as error:
            raise ImportError(
                "corruptions by name need imagecorruptions-imaug: "
                'pip install "lightning-rob[corrupt]"'
            ) from error
        if self.name not in known:
            raise ValueError(f"no corruption {self.name!r}, there are {', '.join(known)}")
        corrupt = known[self.name]
        seeded = "seed" in inspect.signature(corrupt).parameters
        # The package takes images of 8 bits and three channels.
        bytes_ = (255 * x.detach()).round().byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu()
        images, state = [], np.random.get_state()
        try:
            for image, number in zip(bytes_, seed.tolist(), strict=True):
                np.random.seed(number)  # the package draws from numpy's global stream
                own = {"seed": number} if seeded else {}
                found = np.asarray(corrupt(Image.fromarray(image.numpy()), self.severity, **own))
                images.append(torch.from_numpy(found.astype(np.uint8)).permute(2, 0, 1))
        finally:
            np.random.set_state(state)
        return torch.stack(images)[:, : x.shape[1]].to(x) / 255
