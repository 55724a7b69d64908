"""Free memory of a device, and how many images a CPU works on fastest."""

import os
from contextlib import suppress

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


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that new tensors may take on a device; None where it cannot be known."""
    if device.type == "cuda":
        # Memory that torch has reserved and does not use is free.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type == "cpu":
        # Memory that no process uses, without caches of files.
        with suppress(ValueError, OSError):  # macOS has no such setting
            pages = os.sysconf("SC_AVPHYS_PAGES")
            return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None
    return None
