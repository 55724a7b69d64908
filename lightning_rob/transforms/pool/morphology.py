"""Bright and dark regions grown and shrunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from kornia import morphology
from torch import Tensor

from lightning_rob.transforms.base import Transform

Operation = Literal["erosion", "dilation", "opening", "closing", "gradient"]


@dataclass(frozen=True)
class Morphology(Transform):
    """Grey-scale morphology with a flat square; outside the image is left out.

    Erosion is the least of the square that reaches up and left, dilation the largest of its mirror
    image, so that opening and closing keep the picture in its place, as in Serra (1982), scipy and
    kornia. OpenCV, which Athena calls, takes the same square for both: with an even side its
    openings and closings move the picture by a pixel.

    Args:
        operation: erosion, dilation, opening, closing or gradient (dilation less erosion).
        size: side of the square in pixels.
    """

    operation: Operation
    size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operation not in get_args(Operation):
            raise ValueError(f"operation must be of {get_args(Operation)}, got {self.operation!r}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        operation: Callable[..., Tensor] = getattr(morphology, self.operation)
        return operation(x, x.new_ones(self.size, self.size))
