"""Those that move pixels to other places and can be undone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import Transform


@dataclass(frozen=True)
class Identity(Transform):
    """The image as it is."""

    reversible: ClassVar[bool] = True

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return x

    def undo(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return x


@dataclass(frozen=True)
class Rotate(Transform):
    """Turn anticlockwise by quarters of a circle, exactly.

    Athena's code turns about the pixel (14, 14), which is not the middle of 28, and so loses a
    line of the image; here the middle is the middle.

    Args:
        quarters: 1, 2 or 3 times 90 degrees; all but 2 need square images.
    """

    quarters: int

    reversible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quarters not in (1, 2, 3):
            raise ValueError(f"quarters must be 1, 2 or 3, got {self.quarters}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        if self.quarters != 2 and x.shape[2] != x.shape[3]:
            raise ValueError(f"a quarter turn needs square images, got {list(x.shape)}")
        return x.rot90(self.quarters, (2, 3))

    def undo(self, x: Tensor) -> Tensor:
        """Turn back: [B, C, H, W] -> [B, C, H, W]."""
        return x.rot90(-self.quarters, (2, 3))


@dataclass(frozen=True)
class Flip(Transform):
    """The image in a mirror.

    Args:
        horizontal: exchange left and right.
        vertical: exchange top and bottom.
    """

    horizontal: bool = False
    vertical: bool = False

    reversible: ClassVar[bool] = True

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return x.flip([2] * self.vertical + [3] * self.horizontal)

    def undo(self, x: Tensor) -> Tensor:
        """The same again."""
        return self.apply(x)


@dataclass(frozen=True)
class Shift(Transform):
    """Shift by whole pixels; black comes in, and what is pushed out is lost.

    A later version of Athena's code shifts by fractions of a pixel, so that it blurs as well.

    Args:
        rows: downwards, as a share of the height; negative is up. Rounded towards zero to pixels.
        columns: to the right, as a share of the width.
    """

    rows: float = 0.0
    columns: float = 0.0

    reversible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "columns"):
            if not -1 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share in (-1, 1), got {getattr(self, name)}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return _moved(x, *self._pixels(x))

    def undo(self, x: Tensor) -> Tensor:
        """Shift back: 0 where `kept` is not, the pixels that the shift has pushed out."""
        down, right = self._pixels(x)
        return _moved(x, -down, -right)

    def kept(self, x: Tensor) -> Tensor:
        """[H, W] bool: the pixels of images as large as x that survive a shift and its undoing."""
        return self.undo(self.apply(torch.ones_like(x[:1, :1])))[0, 0] > 0

    def _pixels(self, x: Tensor) -> tuple[int, int]:
        return int(self.rows * x.shape[2]), int(self.columns * x.shape[3])


def _moved(x: Tensor, down: int, right: int) -> Tensor:
    return pad(x, [right, -right, down, -down])
