"""How many images a CPU works on fastest."""

import torch
from torch import Tensor

# Convolutions of more images at a time are slower, image by image (docs/performance.md).
IMAGES_PER_THREAD = 64


def images_at_once(x: Tensor) -> int:
    """Return how many images of a batch [B, …] to work on at a time: on a CPU, what caches hold."""
    parts = 1
    if x.device.type == "cpu":
        # Rounded up, so that the parts are about as large as each other.
        parts = -(-len(x) // (IMAGES_PER_THREAD * torch.get_num_threads()))
    return -(-len(x) // max(parts, 1))
