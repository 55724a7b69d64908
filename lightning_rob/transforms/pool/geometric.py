"""A swirl, and images put together again from their projections."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from skimage import transform
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.geometric import Swirl
from lightning_rob.transforms.one_by_one import Picture, each


@dataclass(frozen=True)
class SwirlMiddle(Transform):
    """Turn the image about its middle, less and less with the distance; a mirror outside.

    As `skimage.transform.swirl`, whose middle is the pixel (W / 2, H / 2).

    Args:
        strength: in radians.
        radius: in pixels.
    """

    strength: float = 3.0
    radius: float = 65.0

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        rows, columns = x.shape[2:]
        reach = math.hypot(rows, columns) / 2
        down, across = (min(math.ceil(reach - n / 2) + 1, n - 1) for n in (rows, columns))
        mirrored = pad(x, [across, across, down, down], mode="reflect")
        middle = x.new_tensor([across + columns / 2, down + rows / 2]).expand(len(x), 2)
        radius, strength = (
            x.new_full((len(x),), number) for number in (self.radius, self.strength)
        )
        turned = Swirl().apply(mirrored, middle, radius, strength)
        return turned[..., down : down + rows, across : across + columns]


@dataclass(frozen=True)
class Projections(Transform):
    """Project the image along many directions (Radon) and put it together again.

    Of each channel, twice its values less one, within the largest circle; what is outside it
    becomes mid-grey. Athena's code projects what is outside as well, against its library's advice.

    Args:
        first: the first angle in degrees.
        last: the angle at which to stop before.
        algebraic: by SART (Andersen and Kak 1984), else by filtered back-projection.
        count: how many angles.
    """

    first: float
    last: float
    algebraic: bool = False
    count: int = 28

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]; images that are not square are padded with mid-grey."""
        rows, columns = x.shape[2:]
        side = max(rows, columns)
        square = pad(2 * x - 1, [0, side - columns, 0, side - rows])
        return each(square, self._again)[..., :rows, :columns] / 2 + 0.5

    def _again(self, image: Picture) -> Picture:
        angles = np.linspace(self.first, self.last, self.count, endpoint=False)
        middle = image.shape[-1] // 2
        place = (np.arange(image.shape[-1]) - middle) ** 2
        inside = place[:, None] + place <= middle**2
        shadows = [transform.radon(plane * inside, angles) for plane in image]  # type: ignore[no-untyped-call]
        back: Callable[..., Picture] = transform.iradon_sart if self.algebraic else transform.iradon
        return np.stack([back(shadow, angles) for shadow in shadows])
