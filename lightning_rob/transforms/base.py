"""What all transforms share: chance first, then a deterministic function of image and chance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, uniform

EPS = 1e-9
ROUNDING = 4  # steps of rounding beyond a bound: white stays white in a blur, but for these


@dataclass(frozen=True)
class Transform(ABC):
    """A random transform of images in [0, 1], one of the 33 of Sitawarin et al. (ICML 2022).

    All chance is in `sample`, so `transform(x, *transform.sample(x, generator))` can be replayed,
    and every image of a batch has parameters of its own. Subclasses are frozen dataclasses; those
    with a strength have `alpha` in [0, 1], by default 0.5, where the paper's search ends.

    Args:
        p: probability that an image is transformed. A defense that composes transforms goes by
            it; a call transforms every image.

    Raises:
        ValueError: alpha or p outside [0, 1].
    """

    p: float = field(default=1.0, kw_only=True)

    differentiable: ClassVar[bool] = True
    reversible: ClassVar[bool] = False  # whether there is an `undo`

    def __post_init__(self) -> None:
        for one in fields(self):  # a recipe writes lists, which have no hash
            if isinstance(value := getattr(self, one.name), list):
                object.__setattr__(self, one.name, tuple(value))
        for name in ("alpha", "p"):
            if not 0 <= getattr(self, name, 0) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """Draw the random parameters, one set per image: here none.

        Args:
            x: [B, C, H, W] images in [0, 1].
            generator: see `lightning_rob.randomness.uniform`.

        Returns:
            Tensors of first dimension B, which `__call__` takes in this order.
        """
        return ()

    @final
    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        """Transform images; the same parameters give the same images.

        Args:
            x: [B, C, H, W] images in [0, 1].
            *params: what `sample` returns, or numbers of the same shapes and units.

        Returns:
            [B, C, H, W] in [0, 1]; an image whose result has a NaN is returned as it came.

        Raises:
            ValueError: x is no batch of images, or the transform is not for such channels.
            RuntimeError: a gradient is wanted of a transform that has none.
        """
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"{self._name} takes floating [B, C, H, W], got {x.dtype} {list(x.shape)}"
            )
        if not self.differentiable and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._name} has no gradient: call it under torch.no_grad or on a detached image"
            )
        with torch.autocast(x.device.type, enabled=False):
            return self._guarded(x, *params) if len(x) else x

    @abstractmethod
    def apply(self, x: Tensor, *params: Any) -> Tensor:
        """The transform itself, still without range and NaN guard; see `__call__`."""

    def undo(self, x: Tensor) -> Tensor:
        """Bring back images, or perturbations of them, of a transform without chance.

        Args:
            x: [B, C, H, W] transformed.

        Returns:
            [B, C, H, W], 0 where the transform has lost what was there.

        Raises:
            TypeError: it is not reversible.
        """
        raise TypeError(f"{self._name} cannot be undone")

    def as_released(self) -> Self:
        """The transform with each slip of the authors' code that it has as an option.

        The share of images transformed is no part of it: `RandomTransforms(released_code=True)`
        has that slip of p.
        """
        slips: dict[str, Any] = {"released_code": True} if hasattr(self, "released_code") else {}
        return replace(self, **slips)

    def _guarded(self, x: Tensor, *params: Tensor) -> Tensor:
        y = self.apply(x, *params)
        failed = y.detach().flatten(1).amax(1).isnan()[:, None, None, None]
        if torch.compiler.is_exporting():  # without choices by value, and without a gradient
            return torch.where(failed, x, y).clamp(0, 1)
        if failed.any():  # transformed again, since 0 * nan would spoil the gradient of x
            y = self.apply(torch.where(failed, x.detach(), x), *params)
            y = torch.where(failed, x, y)
        return clip(y, 0, 1)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _need_rgb(self, x: Tensor) -> None:
        if x.shape[1] != 3:
            raise ValueError(f"{self._name} is about colour and needs RGB, got {list(x.shape)}")


def check_range(name: str, given: tuple[float, float] | None, least: float, most: float) -> None:
    """Raise ValueError unless a range, if one is given, is two numbers in order within bounds."""
    if given is not None and not (len(given) == 2 and least <= given[0] <= given[1] <= most):
        raise ValueError(f"{name} must be a range within [{least:g}, {most:g}], got {given}")


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with slope 1 at the bounds too, where torch's slope depends on its release.

    With slope 0 there, an attack would not see the black and the white pixels of an image. So it
    is within rounding of the bounds: a blur, whose weights sum to one but for rounding, may take
    white a little beyond white.
    """
    if torch.compiler.is_exporting() or not (x.requires_grad and torch.is_grad_enabled()):
        return x.clamp(low, high)
    clipped: Tensor = _Clip.apply(x, low, high)
    return clipped


class _Clip(torch.autograd.Function):
    """One operation where a choice by comparison is four, on every transform of every copy."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, low, high = inputs
        slack = ROUNDING * torch.finfo(x.dtype).eps * max(abs(low), abs(high))
        ctx.low, ctx.high = low - slack, high + slack
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        # of slope 0 at its bounds, which therefore lie just beyond ours
        return torch.ops.aten.hardtanh_backward(gradient, x, ctx.low, ctx.high), None, None


def pinned(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with slope 1 everywhere, for what leaves the bounds almost everywhere."""
    return x + (x.clamp(low, high) - x).detach()


def raised(x: Tensor, low: float) -> Tensor:
    """At least `low`, with slope 1 everywhere, so that an attack can leave what is below."""
    return x + (x.clamp_min(low) - x).detach()


def between(x: Tensor, low: float, high: float, *shape: int, generator: Generator) -> Tensor:
    """[B, *shape] uniform in [low, high); see `lightning_rob.randomness.uniform`."""
    return low + (high - low) * uniform(x, *shape, generator=generator)


def integers(x: Tensor, low: int, high: int, *shape: int, generator: Generator) -> Tensor:
    """[B, *shape] int64, uniform over low, …, high."""
    return between(x, low, high + 1, *shape, generator=generator).floor().long().clamp_max(high)


def over_pixels(values: Tensor) -> Tensor:
    """Numbers per image [B], or per image and channel [B, C], shaped to meet [B, C, H, W]."""
    return values[(..., *[None] * (4 - values.dim()))]
