"""Corruptions of images at five severities (Hendrycks and Dietterich 2019)."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_rob.randomness import Generator
from lightning_rob.transforms.base import Transform, integers

OFFSETS = (0.05, 0.1, 0.15, 0.2, 0.3)  # CIFAR-10-C adds them to the value, at severities 1 … 5
LARGEST_SEED = 2**24 - 1  # float32 represents all integers up to here


def check_severity(severity: int) -> None:
    """Raise ValueError unless the severity is 1, 2, 3, 4 or 5."""
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1 … 5, got {severity}")


@dataclass(frozen=True)
class Brightness(Transform):
    """Raise the value of HSV, as CIFAR-10-C does: hue and saturation stay.

    The same number is added to a grey image, of one channel or three.

    Args:
        severity: 1 … 5, which add 0.05, 0.1, 0.15, 0.2 and 0.3.

    Raises:
        ValueError: the severity is none of 1 … 5.
    """

    severity: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_severity(self.severity)

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
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

    Raises:
        ImportError: when called without the package.
        ValueError: the severity is none of 1 … 5; when called, unknown name or images below 32x32.
    """

    name: str
    severity: int = 1
    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_severity(self.severity)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(seed [B] int64 of the randomness in the corruption)."""
        return (integers(x.float(), 0, LARGEST_SEED - 1, generator=generator),)

    def apply(self, x: Tensor, seed: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        if min(x.shape[2:]) < 32:
            raise ValueError(f"{self.name} is for images from 32x32, got {list(x.shape)}")
        corrupt = _lookup(self.name)
        bytes_ = (255 * x.detach()).round().byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu()
        state = np.random.get_state()  # the package draws from numpy's global stream
        try:
            images = [self._corrupted(corrupt, *pair) for pair in zip(bytes_, seed, strict=True)]
        finally:
            np.random.set_state(state)
        return torch.stack(images)[:, : x.shape[1]].to(x) / 255

    def _corrupted(self, corrupt: Callable[..., Any], image: Tensor, seed: Tensor) -> Tensor:
        """[H, W, 3] -> [3, H, W], both of 0 … 255."""
        np.random.seed(int(seed))
        own = {"seed": int(seed)} if "seed" in inspect.signature(corrupt).parameters else {}
        found = np.asarray(corrupt(Image.fromarray(image.numpy()), self.severity, **own))
        return torch.from_numpy(found.astype(np.uint8)).permute(2, 0, 1)


def _lookup(name: str) -> Callable[..., Any]:
    try:
        import imagecorruptions
    except ImportError as error:
        raise ImportError(
            'corruptions by name need imagecorruptions-imaug: pip install "lightning-rob[corrupt]"'
        ) from error
    known = imagecorruptions.corruption_dict
    if name not in known:
        raise ValueError(f"no corruption {name!r}, there are {', '.join(known)}")
    corrupt: Callable[..., Any] = known[name]
    return corrupt
