"""Cartoons: smooth areas with dark outlines."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from kornia.color import rgb_to_grayscale
from kornia.filters import bilateral_blur, box_blur, gaussian_blur2d, median_blur
from kornia.geometry.transform import pyrdown, pyrup
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.pool.eight_bit import WHITE, levels, rounded


@dataclass(frozen=True)
class Cartoon(Transform):
    """Smooth by many bilateral filters and blacken what is darker than its surroundings.

    The image has eight bits between all steps. Athena's configurations ask for windows of 7 to
    250 pixels, its code takes the same small one for all; so does this. kornia's pyramid and
    square window are used for OpenCV's: on digits 0.02 apart on average, or less.

    Args:
        halvings: how often the image is halved before smoothing, and doubled after it.
        smoothings: how many bilateral filters, one after the other.
        block: side in pixels, odd, of the surroundings.
        darker: by how many of 255 levels an outline is darker than the mean of its surroundings.
        gaussian: weigh the surroundings by a Gaussian, else all alike.
        color: standard deviation of the bilateral filter in levels.
        space: standard deviation of the bilateral filter in pixels.
        window: side in pixels, odd, of the bilateral filter.
    """

    halvings: int
    smoothings: int
    block: int
    darker: float
    gaussian: bool = False
    color: float = 300.0
    space: float = 30.0
    window: int = 7

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], C = 1 or 3."""
        if x.shape[1] not in (1, 3):
            raise ValueError(f"Cartoon needs one or three channels, got {list(x.shape)}")
        return self._smooth(x)[..., : x.shape[2], : x.shape[3]] * ~self._outlines(x)

    def _smooth(self, x: Tensor) -> Tensor:
        step = 2**self.halvings
        y = rounded(pad(x, [0, -x.shape[3] % step, 0, -x.shape[2] % step], mode="replicate"))
        for _ in range(self.halvings):
            y = rounded(pyrdown(y))
        y = self._blurred(y)
        for _ in range(self.halvings):
            y = rounded(pyrup(y))
        return y

    def _blurred(self, y: Tensor) -> Tensor:
        """All bilateral filters; an image that one of them leaves as it is needs no more."""
        y, moving = y.clone(), torch.arange(len(y), device=y.device)
        for _ in range(self.smoothings):
            before, spread = y[moving], (self.space, self.space)
            after = rounded(bilateral_blur(before, self.window, self.color / WHITE, spread))
            y[moving] = after
            moving = moving[(after != before).flatten(1).any(1)]
            if not len(moving):
                break
        return y

    def _outlines(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 1, H, W] bool."""
        grey = rounded(x if x.shape[1] == 1 else rgb_to_grayscale(x))
        calm = median_blur(grey, 3, "replicate")
        if self.gaussian:
            std = 0.3 * ((self.block - 1) / 2 - 1) + 0.8  # as OpenCV, where none is given
            around = gaussian_blur2d(calm, self.block, (std, std), "replicate")
        else:
            around = box_blur(calm, self.block, "replicate")
        return levels(calm) <= levels(around) - self.darker
