"""Base class of all transforms: sample the parameters, then apply a deterministic function."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, final, get_args, get_origin

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import hardtanh

from lightning_rob.randomness import Generator, uniform

EPS = 1e-9
ROUNDING = 4  # steps of rounding beyond a bound: white stays white in a blur, but for these

NumpyImage = NDArray[Any]


@dataclass(frozen=True)
class Transform(ABC):
    """A random transform of images in [0, 1], one of the 33 of Sitawarin et al. (ICML 2022).

    All randomness is in `sample`: `transform(x, *transform.sample(x, generator))` can be replayed,
    and every image of a batch has parameters of its own. Subclasses that add arguments are frozen
    dataclasses.

    Args:
        p: probability that a defense which composes transforms applies this one to an image; a
            call transforms every image.
    """

    p: float = field(default=1.0, kw_only=True)

    channels: ClassVar[tuple[int, ...]] = ()  # the numbers of channels it takes; () is any
    differentiable: ClassVar[bool] = True
    reversible: ClassVar[bool] = False  # whether there is an `undo`
    limits: ClassVar[tuple[tuple[str, float, float], ...]] = ()  # (argument, lowest, highest)
    odd: ClassVar[str] = ""  # the argument with the sides of kernels, which are odd

    def __post_init__(self) -> None:
        if hidden := [f.name for f in fields(self) if f.name != "p" and hasattr(Transform, f.name)]:
            raise TypeError(
                f"{self.class_name} has an argument {hidden[0]!r}, which every transform has "
                "with another meaning: give it another name"
            )
        limits = {name: (low, high) for name, low, high in self.limits}
        limits |= {"alpha": (0, 1), "p": (0, 1)}
        for argument in fields(self):
            name, value = argument.name, getattr(self, argument.name)
            if isinstance(value, list):  # as a recipe has it; a list has no hash
                value = tuple(value)
                object.__setattr__(self, name, value)
            if get_origin(argument.type) is Literal and value not in get_args(argument.type):
                raise ValueError(f"{name} must be of {get_args(argument.type)}, got {value!r}")
            if name in limits and value is not None:
                pair, is_range = value, "tuple" in str(argument.type)
                if not isinstance(value, tuple):
                    pair = (value, value)
                low, high = limits[name]
                inside = len(pair) == 2 and low <= pair[0] <= pair[1] <= high
                if not inside or is_range != isinstance(value, tuple):
                    wanted = "a range within" if is_range else "in"
                    raise ValueError(f"{name} must be {wanted} [{low:g}, {high:g}], got {value}")
            if name == self.odd:
                sides = value if isinstance(value, tuple) else (value,)
                if not sides or any(side < 3 or side % 2 == 0 for side in sides):
                    raise ValueError(f"{name} must be odd and at least 3, got {value}")

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, ...]:
        """Draw the random parameters, one set per image; a deterministic transform has none.

        Returns:
            Tensors of first dimension B, which `__call__` takes in this order.
        """
        return ()

    @final
    def __call__(self, x: Tensor, *params: Tensor) -> Tensor:
        """Transform images; the same parameters give the same images.

        Args:
            *params: the result of `sample`, or numbers of the same shapes and units.

        Returns:
            [B, C, H, W] in [0, 1]; an image whose result has a NaN is returned unchanged.

        Raises:
            ValueError: x is not a batch of images, or has channels that the transform refuses.
            RuntimeError: x requires a gradient and the transform has none.
        """
        name, shape = self.class_name, list(x.shape)
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(f"{name} takes floating [B, C, H, W], got {x.dtype} {shape}")
        if self.channels and x.shape[1] not in self.channels:
            counts = " or ".join(map(str, self.channels))
            raise ValueError(f"{name} takes images of {counts} channels, got {shape}")
        if not self.differentiable and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} has no gradient: call it under torch.no_grad or on a detached image"
            )
        with torch.autocast(x.device.type, enabled=False):
            return self._apply_finite(x, *params) if len(x) else x

    @abstractmethod
    def apply(self, x: Tensor, *params: Any) -> Tensor:
        """Compute the transform [B, C, H, W], before clamping and before the guard against NaN."""

    def undo(self, x: Tensor) -> Tensor:
        """Invert a deterministic transform on images, or on perturbations of them.

        Returns:
            [B, C, H, W], 0 where the transform has discarded the pixels.

        Raises:
            TypeError: the transform is not reversible.
        """
        raise TypeError(f"{self.class_name} cannot be undone")

    def as_released(self) -> Self:
        """Return the transform with every slip of the authors' code that it has as an option.

        Their slip in the probability p is excluded: `RandomTransforms(released_code=True)` has it.
        """
        slips: dict[str, Any] = {"released_code": True} if hasattr(self, "released_code") else {}
        return replace(self, **slips)

    @property
    def class_name(self) -> str:
        """The name of the class, by which a defense knows the transform."""
        return type(self).__name__

    def _apply_finite(self, x: Tensor, *params: Tensor) -> Tensor:
        # A hook on x itself would act on gradients that other uses of x have.
        source = x.view_as(x)
        y = self.apply(source, *params)
        failed = y.detach().flatten(1).amax(1).isnan()[:, None, None, None]
        exports = torch.compiler.is_exporting()  # no branch by value, and no gradient
        if x.device.type == "cpu" and not exports and not failed.any():  # others would wait
            return clip(y, 0, 1)
        if source.requires_grad and not exports:  # 0 * nan would spoil the gradient of x
            source.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: torch.where(failed, 0.0, gradient)
            )
        return clip(torch.where(failed, x, y), 0, 1)


@dataclass(frozen=True)
class AlphaTransform(Transform):
    """A transform with a strength; the paper's search for the best strengths ends at 0.5."""

    alpha: float = 0.5


class NumpyTransform(Transform):
    """A transform of single images by numpy, without a gradient."""

    differentiable = False

    def apply(self, x: Tensor, *numbers: Any) -> Tensor:
        return map_images(x, self.transform_image, *numbers)

    @abstractmethod
    def transform_image(self, image: NumpyImage, *numbers: Any) -> NumpyImage:
        """Transform an image [C, H, W] of double precision by its own numbers of `sample`."""


def map_images(x: Tensor, function: Callable[..., NumpyImage], *numbers: Tensor) -> Tensor:
    """Apply a function of numpy images [C, H, W] and of numbers to each image and its numbers."""
    # In double precision, in which scikit-image computes.
    images, values = x.detach().cpu().double().numpy(), (number.tolist() for number in numbers)
    changed = [function(*each) for each in zip(images, *values, strict=True)]
    return torch.from_numpy(np.stack(changed)).to(x)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with slope 1 at the bounds too, where torch's slope depends on its release."""
    # With slope 0 there, an attack would not see the black and the white pixels of an image. A
    # blur, whose weights sum to one but for rounding, may take white a little beyond white.
    slack = ROUNDING * torch.finfo(x.dtype).eps * max(abs(low), abs(high))
    y = hardtanh(x, low - slack, high + slack)  # its gradient takes a quarter of a clamp's time
    with torch.no_grad():
        y.clamp_(low, high)
    return y


def pinned(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with slope 1 everywhere (straight-through), for values mostly out of bounds."""
    return x + (x.clamp(low, high) - x).detach()


def raised(x: Tensor, low: float) -> Tensor:
    """Clamp from below with slope 1 everywhere, so that an attack can leave the region below."""
    return x + (x.clamp_min(low) - x).detach()


def soft_round(t: Tensor) -> Tensor:
    """Round with a slope (RT paper, eq. 14; Shin and Song 2017): round(t) + (t - round(t))^3."""
    nearest = t.round()
    return nearest + (t - nearest) ** 3


def soft_modulo(t: Tensor) -> Tensor:
    """Compute t mod 1 with a slope (RT paper, eq. 15): r = t - soft_round(t), or r + 1 if r < 0.

    It is 0 at integers, as in the authors' code, where eq. 15 to the letter has 1. The result, in
    [0, 1), differs from t also on [0, 1).
    """
    r = t - soft_round(t)
    return r + (r < 0).to(r)


def between(x: Tensor, low: float, high: float, *shape: int, generator: Generator) -> Tensor:
    """[B, *shape] uniform in [low, high); see `lightning_rob.randomness.uniform`."""
    return low + (high - low) * uniform(x, *shape, generator=generator)


def integers(x: Tensor, low: int, high: int, *shape: int, generator: Generator) -> Tensor:
    """[B, *shape] int64, uniform over low, …, high."""
    return between(x, low, high + 1, *shape, generator=generator).floor().long().clamp_max(high)


def over_pixels(values: Tensor) -> Tensor:
    """Reshape [B] or [B, C] numbers so that they broadcast with [B, C, H, W]."""
    return values[(..., *[None] * (4 - values.dim()))]
