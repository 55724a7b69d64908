"""Contexts in which attacks and evaluations run and leave no trace in the defense."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from lightning_rob.attacks.folding import folded
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import own_copy
from lightning_rob.runtime.precision import in_float32

M = TypeVar("M", bound=nn.Module)


@contextmanager
def evaluating(defense: M) -> Iterator[M]:
    """Yield a working copy of a defense in eval mode, with full float32.

    The defense itself is not touched: a signal handler or another thread that reads it meanwhile
    sees its own weights and modes. A working copy is taken as it is. Parts that compiled code
    refers to are shared (`lightning_rob.defenses.copies`); their modes are restored on exit.
    """
    with torch.inference_mode(False), in_float32():
        copied = own_copy(defense)
        modes = [(module, module.training) for module in copied.modules()]
        copied.eval()
        try:
            yield copied
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def attacking(defense: M) -> Iterator[M]:
    """As `evaluating`, with gradients for images but not for weights.

    Works inside `torch.inference_mode` and autocast. In the working copy BatchNorm is folded into
    the convolutions, and TF32 is off unless an enclosing `in_float32` allows it.
    """
    cached = torch.is_autocast_cache_enabled()
    with evaluating(defense) as copied, torch.enable_grad(), folded(foldable_networks(copied)):
        grads = [(weight, weight.requires_grad) for weight in copied.parameters()]
        try:
            # A weight cast in here would have no gradient in the training step around.
            torch.set_autocast_cache_enabled(False)
            for weight, _ in grads:
                weight.requires_grad_(False)
            yield copied
        finally:
            torch.set_autocast_cache_enabled(cached)
            for weight, grad in grads:
                weight.requires_grad_(grad)


def foldable_networks(defense: nn.Module) -> list[nn.Module]:
    """Return the networks that are only called as a whole: a network itself, none if unknown."""
    if not isinstance(defense, Defense):
        return [defense]
    try:
        return defense.foldable_networks
    except TypeError:
        return []
