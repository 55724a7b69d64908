"""The gradients that attacks follow."""

import torch
from torch import Tensor

from lightning_rob.errors import NoGradientError


def image_gradient(value: Tensor, x: Tensor, *, keep: bool = False) -> Tensor:
    """Return the gradient [b, …] of the sum of values [b] by images.

    Args:
        value: [b] values computed from the images.
        x: [b, …] images that require gradients, or what they were computed from.
        keep: keep the graph, for another gradient of it.

    Raises:
        NoGradientError: nothing leads from the values back to the images.
    """
    if not value.requires_grad:
        raise NoGradientError()
    (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise NoGradientError()
    return gradient
