"""The gradients that an attack asks for, image by image, and whether they are of use."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, Streams
from lightning_rob.runtime.errors import NoGradientError

_current: ContextVar["Sight | None"] = ContextVar("sight", default=None)


class Sight:
    """The gradients that attacks have asked for, image by image."""

    def __init__(
        self,
        images: int,
        device: torch.device,
        within: "Sight | None" = None,
        watched: bool = False,
    ) -> None:
        none = torch.zeros(images, device=device)
        # An attack inside another one is on images of that one's batch: they share the counts [B]
        # of the gradients of an image, and of those that were finite and not zero.
        self.asked: Tensor = within.asked if within else none
        self.usable: Tensor = within.usable if within else none.clone()
        # Where the caller reports what is seen, attacks need not warn.
        self.watched: bool = watched or (within is not None and within.watched)
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=device)  # in this attack alone
        self.recovered = False  # whether gradients were taken just inside the bounds in the end

    def note(self, gradient: Tensor, generator: Generator) -> None:
        """Take in the gradients [b, …] of the images that a source of noise belongs to."""
        # One number an image, and no look at it: a GPU would have to finish its work first.
        largest = gradient.flatten(1).abs().amax(1)
        finite = largest.isfinite()
        self.nonfinite = self.nonfinite | ~finite.all()
        rows = generator.rows if isinstance(generator, Streams) else None
        if rows is None and len(gradient) != len(self.asked):
            return  # a part of the batch, and nothing says which
        if rows is None:
            rows = torch.arange(len(gradient), device=gradient.device)
        self.asked.index_add_(0, rows, torch.ones_like(largest, dtype=self.asked.dtype))
        self.usable.index_add_(0, rows, (finite & (largest > 0)).to(self.usable))

    @property
    def blind(self) -> Tensor:
        """1 for images [B] without a useful gradient, else 0; NaN where none was asked for."""
        return (self.usable == 0).float().masked_fill(self.asked == 0, torch.nan)


@contextmanager
def watching(images: int, device: torch.device) -> Iterator[Sight]:
    """Yield what the attacks inside this context see of a batch of B images."""
    with _entered(Sight(images, device, watched=True)) as sight:
        yield sight


@contextmanager
def own_sight(images: int, device: torch.device, generator: Generator) -> Iterator[Sight]:
    """Yield the sight of one attack, which counts for that of an attack around it as well."""
    outer = _current.get()
    # Rows of an outermost attack are places in its own batch, even if that is part of a larger one.
    streams = generator if outer is None and isinstance(generator, Streams) else None
    rows = None if streams is None else streams.rows
    # Of another number of images, as of those that a defense learns from, nothing says which.
    known = isinstance(generator, Streams) and generator.rows is not None
    within = outer if outer and (known or images == len(outer.asked)) else None
    try:
        if streams is not None:
            streams.rows = None
        with _entered(Sight(images, device, within, watched=within is not outer)) as sight:
            yield sight
    finally:
        if streams is not None:
            streams.rows = rows
    if outer is not None:
        outer.recovered |= sight.recovered


@contextmanager
def _entered(sight: Sight) -> Iterator[Sight]:
    token = _current.set(sight)
    try:
        yield sight
    finally:
        _current.reset(token)


def noted(gradient: Tensor, generator: Generator) -> Tensor:
    """Return gradients [b, …] of images that an attack can follow: 0 where they are not finite."""
    if sight := _current.get():
        sight.note(gradient.detach(), generator)
    return gradient.nan_to_num(0.0, 0.0, 0.0)


def hooked(x: Tensor, generator: Generator) -> None:
    """Note the gradient of a tensor of images whenever one is computed, and make it finite."""
    x.register_hook(lambda gradient: noted(gradient, generator))  # type: ignore[no-untyped-call]


def image_gradient(
    value: Tensor, x: Tensor, generator: Generator = None, *, keep: bool = False
) -> Tensor:
    """Return the gradient [b, …] of the sum of values [b] by images, 0 where it is not finite."""
    if not value.requires_grad:
        raise NoGradientError()
    (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise NoGradientError()
    return noted(gradient, generator)
