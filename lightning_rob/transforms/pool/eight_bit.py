"""Images as files and byte arrays have them."""

from torch import Tensor

WHITE = 255


def levels(x: Tensor) -> Tensor:
    """The nearest of 0, 1, …, 255 for numbers in [0, 1], still floating."""
    return (x * WHITE).round()


def rounded(x: Tensor) -> Tensor:
    """The nearest multiples of 1 / 255."""
    return levels(x) / WHITE
