"""Regions by their borders."""

from dataclasses import dataclass
from typing import ClassVar

from skimage import filters, morphology
from torch import Tensor

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.one_by_one import Picture, each
from lightning_rob.transforms.pool.eight_bit import WHITE, levels


@dataclass(frozen=True)
class Borders(Transform):
    """The range of the eight-bit values in a small disk, after a median in a larger one.

    Each channel by itself. Athena's code takes the 255 levels for numbers in [0, 1], so that its
    images are black and white.

    Args:
        median: radius of the first disk in pixels.
        gradient: radius of the second disk in pixels.
    """

    median: int = 2
    gradient: int = 1

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return each(levels(x), self._borders) / WHITE

    def _borders(self, image: Picture) -> Picture:
        sides = self.median, self.gradient
        large, small = ((morphology.disk(side) > 0)[None] for side in sides)  # type: ignore[no-untyped-call]
        calm = filters.rank.median(image.astype("uint8"), large)  # type: ignore[no-untyped-call]
        borders: Picture = filters.rank.gradient(calm, small)  # type: ignore[no-untyped-call]
        return borders
