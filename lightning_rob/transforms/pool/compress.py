"""Compressed and decompressed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.jpeg import jpeg
from lightning_rob.transforms.pool.eight_bit import rounded


@dataclass(frozen=True)
class CompressJPEG(Transform):
    """JPEG of a quality, by smooth rounding, so that it has a gradient.

    On digits a pixel is on average 0.6 to 1.5 of 255 levels away from what Pillow's files give,
    which are themselves 2 to 8 levels away from the image.

    Args:
        quality: from 1 to 100.
    """

    quality: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be 1 … 100, got {self.quality}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], C = 1 or 3."""
        if x.shape[1] not in (1, 3):
            raise ValueError(f"JPEG needs one or three channels, got {list(x.shape)}")
        quality = x.new_full((len(x),), self.quality)
        return jpeg(x, quality, transposed=False)


@dataclass(frozen=True)
class CompressPNG(Transform):
    """PNG, which loses nothing: the image rounded to eight bits, whatever the level.

    Args:
        level: of compression, from 0 to 9; the result is the same for all.
    """

    level: int

    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.level <= 9:
            raise ValueError(f"level must be 0 … 9, got {self.level}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return rounded(x)
