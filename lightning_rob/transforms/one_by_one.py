"""Functions of numpy on the images of a batch, one after the other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Picture = NDArray[Any]


def each(x: Tensor, function: Callable[..., Picture], *numbers: Tensor) -> Tensor:
    """Apply a function to each image and its numbers.

    Args:
        x: [B, C, H, W], which the function gets as [C, H, W] of double precision.
        function: (image, *numbers) -> image of any one shape.
        *numbers: [B] each, one number per image.

    Returns:
        [B, …] of x's type, on its device.
    """
    images, values = x.detach().cpu().double().numpy(), (number.tolist() for number in numbers)
    changed = [function(*each) for each in zip(images, *values, strict=True)]
    return torch.from_numpy(np.stack(changed)).to(x)
