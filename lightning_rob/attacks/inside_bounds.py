"""Gradients of pixels that lie exactly at a bound, and any attack with other gradients."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rob.attacks.around import AttackDecorator
from lightning_rob.attacks.base import Backward, Forward, entered, other_forward
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator
from lightning_rob.transforms.base import pinned


@dataclass(frozen=True)
class InsideBounds(Backward):
    """Gradients are those at the image moved inwards by a hair; the logits stay what they are.

    A network that clamps its input has slope 0 at pixels that are exactly black or white: for
    `torch.clamp` from torch 2.14 on, for `hardtanh`, `relu` and `relu6` in every release. The
    slope just inside is that of the only way such a pixel can go. Costs one more forward.

    Args:
        hair: how far, in pixel units; at least one rounding step of the image's precision.
        bounds: smallest and largest value of a pixel, those of the threat.

    Raises:
        ValueError: a hair that is not positive, or has no room within the bounds.
        TypeError: when entered, the defense names no networks, as one that adapts: attack what it
            has become, GMSA(inner=PGD(backward=InsideBounds())).
    """

    hair: float = 1e-4
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        low, high = self.bounds
        if not 0 < self.hair < (high - low) / 2:
            raise ValueError(f"hair must be positive and fit into {self.bounds}, got {self.hair}")

    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        """A context in which the defense's networks have these gradients."""
        return other_forward(defense.foldable_networks, self._forward)

    def _forward(self, plain: Forward) -> Forward:
        low, high = self.bounds

        def forward(x: Tensor) -> Tensor:
            if not (torch.is_grad_enabled() and x.requires_grad):
                return plain(x)
            with torch.no_grad():
                logits = plain(x)
            hair = max(self.hair, torch.finfo(x.dtype).eps)
            shown: Tensor = _Shown.apply(logits, plain(pinned(x, low + hair, high - hair)))
            return shown

        return forward


class _Shown(torch.autograd.Function):
    """The first value to the last bit, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


@dataclass(frozen=True)
class WithBackward(AttackDecorator):
    """Another attack, whose gradients are those of a backward: what `backward` is to PGD, for all.

    Args:
        attack: such as ARC, CW, DeepFool or AutoAttack.
        backward: such as InsideBounds, or several, entered in turn with the defense.

    Raises:
        TypeError: when called on a defense that the backward is not for.
    """

    backward: Backward | Sequence[Backward]

    def __post_init__(self) -> None:
        if isinstance(self.backward, Sequence):
            object.__setattr__(self, "backward", tuple(self.backward))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        with entered(self.backward, defense):
            return self.attack.perturb(defense, x, y, generator)
