"""What an attack sees: the gradients of each image that it asks for, and whether they are of use."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_rob.errors import NoGradientError
from lightning_rob.randomness import Generator, Streams

_current: ContextVar["Sight | None"] = ContextVar("sight", default=None)


class Sight:
    """The gradients that attacks have asked for, image by image.

    Args:
        images: B, the number of images in the batch.
        device: of the images.
        within: the sight of an attack that calls this one on its own batch, which it shares.

    Attributes:
        observed: [B] whether a gradient of the image was asked for.
        usable: [B] whether one of them was finite, and not zero.
        nonfinite: whether any gradient was not finite, in this attack alone.
        recovered: whether gradients were taken just inside the bounds in the end.
    """

    def __init__(
        self, images: int, device: torch.device, within: "Sight | None" = None
    ) -> None:
        none = torch.zeros(images, dtype=torch.bool, device=device)
        self.observed, self.usable = (
            (within.observed, within.usable) if within else (none, none.clone())
        )
        self.nonfinite = none.new_zeros(())
        self.recovered = False

    def note(self, gradient: Tensor, generator: Generator) -> None:
        """Take in the gradients [b, …] of the images that a source of noise belongs to."""
        # One number an image, and no look at it: a GPU would have to finish its work first.
        largest = torch.linalg.vector_norm(gradient.detach().flatten(1), torch.inf, dim=1)
        finite = largest.isfinite()
        self.nonfinite = self.nonfinite | ~finite.all()
        rows = generator.rows if isinstance(generator, Streams) else None
        if rows is None and len(gradient) != len(self.observed):
            return  # a part of the batch, and nothing says which
        chosen = slice(None) if rows is None else rows
        self.observed[chosen] = True
        self.usable[chosen] |= finite & (largest > 0)

    @property
    def blind(self) -> Tensor:
        """The images [B] of which no gradient was of use, NaN for those of which none was asked."""
        return (~self.usable).float().masked_fill(~self.observed, torch.nan)


@contextmanager
def watching(images: int, device: torch.device) -> Iterator[Sight]:
    """Yield what the attacks inside this context see of a batch of B images."""
    sight = Sight(images, device)
    token = _current.set(sight)
    try:
        yield sight
    finally:
        _current.reset(token)


@contextmanager
def own_sight(images: int, device: torch.device) -> Iterator[Sight]:
    """Yield the sight of one attack, which counts for that of an attack around it as well."""
    outer = _current.get()
    sight = Sight(images, device, outer)
    token = _current.set(sight)
    try:
        yield sight
    finally:
        _current.reset(token)
        if outer is not None:
            outer.recovered |= sight.recovered


def is_watched() -> bool:
    """Return whether what attacks see is reported, so that they need not warn."""
    return _current.get() is not None


def image_gradient(
    value: Tensor, x: Tensor, generator: Generator = None, *, keep: bool = False
) -> Tensor:
    """Return the gradient [b, …] of the sum of values [b] by images.

    Args:
        value: [b] values computed from the images.
        x: [b, …] images that require gradients, or what they were computed from.
        generator: the source of the images' noise, by whose streams they are known.
        keep: keep the graph, for another gradient of it.

    Raises:
        NoGradientError: nothing leads from the values back to the images.
    """
    if not value.requires_grad:
        raise NoGradientError()
    (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise NoGradientError()
    if sight := _current.get():
        sight.note(gradient, generator)
    return gradient
