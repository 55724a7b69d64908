"""How many images a CPU works on fastest."""

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Convolutions of more images at a time are slower, image by image (docs/performance.md).
IMAGES_PER_THREAD = 64


def images_at_once(x: Tensor, net: nn.Module | None = None) -> int:
    """Return how many images of a batch [B, …] to work on at a time: on a CPU, what caches hold.

    A network without convolutions takes them all: there each call costs more than the images.
    """
    parts = 1
    if x.device.type == "cpu" and (net is None or has_convolutions(net)):
        # Rounded up, so that the parts are about as large as each other.
        parts = -(-len(x) // (IMAGES_PER_THREAD * torch.get_num_threads()))
    return -(-len(x) // max(parts, 1))


def has_convolutions(net: nn.Module) -> bool:
    """Return whether a network, or a part of it, is a convolution."""
    return any(isinstance(part, _ConvNd) for part in net.modules())
