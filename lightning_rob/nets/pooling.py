"""Mean over the pixels whose gradient has the memory format of its input."""

import torch
from torch import Tensor


@torch.fx.wrap  # a traced network keeps the choice; torch.fx sees only calls from this module
def _mean(x: Tensor) -> Tensor:
    # The gradient of a mean is contiguous: where channels come last in the features, as in attacks
    # on folded networks, that would slow each layer below.
    return x.mean((2, 3)) if x.is_contiguous() else x.permute(0, 2, 3, 1).mean((1, 2))


def spatial_mean(x: Tensor) -> Tensor:
    """Return the mean over the pixels, [B, C, H, W] -> [B, C]."""
    return _mean(x)
