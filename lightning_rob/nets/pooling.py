"""Mean and subsampling whose gradients have the memory format of their input.

The gradients of `x.mean((2, 3))` and of a slice are contiguous. Where channels come last in the
features, as in attacks on folded networks, that slows each layer below.
"""

import torch
from torch import Tensor


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3)) if x.is_contiguous() else x.permute(0, 2, 3, 1).mean((1, 2))


def _subsampled(x: Tensor, stride: int) -> Tensor:
    if x.is_contiguous():
        return x[:, :, ::stride, ::stride]
    return x.permute(0, 2, 3, 1)[:, ::stride, ::stride].permute(0, 3, 1, 2)


# A traced network keeps the choices; torch.fx sees only calls from this module.
torch.fx.wrap("_mean")
torch.fx.wrap("_subsampled")


def spatial_mean(x: Tensor) -> Tensor:
    """Return the mean over the pixels, [B, C, H, W] -> [B, C]."""
    return _mean(x)


def subsampled(x: Tensor, stride: int) -> Tensor:
    """Return every row and column whose number `stride` divides, [B, C, H, W] -> [B, C, H', W']."""
    return _subsampled(x, stride)
