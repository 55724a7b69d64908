"""How many images a CPU works on fastest."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Convolutions of more images at a time are slower, image by image (docs/performance.md).
IMAGES_PER_THREAD = 64
_whole = ContextVar("_whole", default=False)


@contextmanager
def all_at_once() -> Iterator[None]:
    """Let defenses work on whole batches: values on the way are found once each."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def is_whole() -> bool:
    """Return whether this is inside `all_at_once`."""
    return _whole.get()


def images_at_once(x: Tensor, net: nn.Module | None = None) -> int:
    """Return how many images of a batch [B, …] to work on at a time: on a CPU, what caches hold.

    A network of linear layers takes them all: there each call costs more than the images.
    """
    parts = 1
    if x.device.type == "cpu" and not is_whole() and (net is None or not is_linear(net)):
        # Rounded up, so that the parts are about as large as each other.
        parts = -(-len(x) // (IMAGES_PER_THREAD * torch.get_num_threads()))
    return -(-len(x) // max(parts, 1))


def is_linear(net: nn.Module) -> bool:
    """Return whether linear layers alone have weights; convolutions may hide in any other part."""
    for part in net.modules():
        weighs = next(part.parameters(recurse=False), None) is not None
        if isinstance(part, _ConvNd) or (weighs and not isinstance(part, nn.Linear)):
            return False
    return True
