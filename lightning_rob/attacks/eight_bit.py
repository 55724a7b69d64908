"""An attack whose images can be saved: every pixel a whole 255th, and still in the ball."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.around import AttackDecorator
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat, scale

HALVINGS = 12
OUTWARD = 0.499 / 255


@dataclass(frozen=True)
class Quantized8Bit(AttackDecorator):
    """Another attack, its images rounded to 8 bits without leaving its threat.

    Truncation, as `uint8` does it, leaves a ball of 8/255 by another 255th; rounding to the nearest
    may leave it in l2. Here each image is rounded to the nearest; where that is outside the ball,
    its perturbation is shrunk by halves of what is too much until the rounded one is inside.

    Args:
        attack: the attack; the images it is given should be 8-bit images themselves.

    Raises:
        ValueError: pixels do not range over [0, 1].
    """

    def __post_init__(self) -> None:
        if self.threat.bounds != (0.0, 1.0):
            raise ValueError(f"8-bit images range over (0, 1), got bounds {self.threat.bounds}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] of multiples of 1/255 where x is of such, within the threat."""
        x_adv = self.attack(defense, x, y, generator)
        near = rounded(x_adv, x, self.threat)
        if defense.transductive:  # whose answers to part of a round mean nothing
            return near
        # An attack that goes no further than it must may be undone by rounding to the nearest.
        far = rounded(x_adv + (x_adv - x).sign() * OUTWARD, x, self.threat)
        with torch.no_grad():
            keys = (
                [generator[torch.arange(len(x), device=x.device)] for _ in "ab"]
                if isinstance(generator, Streams)
                else [generator] * 2
            )
            right = [
                defense(images, key).gather(1, y[:, None])[:, 0]
                for images, key in zip((near, far), keys, strict=True)
            ]
        return torch.where(_wide(right[1] < right[0], x), far, near)


def rounded(x_adv: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """Images [B, …] of multiples of 1/255 near x_adv and within the threat around x [B, …].

    Where x is no 8-bit image and no such point is found, the nearest to x itself.
    """
    allowed = threat.eps * (1 + 1e-5)
    best = _nearest(x_adv)
    outside = threat.distance(best, x) > allowed
    if not bool(outside.any()):
        return best
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    found = _nearest(x)
    for _ in range(HALVINGS):
        share = (low + high) / 2
        tried = _nearest(x + scale(x_adv - x, share))
        inside = threat.distance(tried, x) <= allowed
        found = torch.where(_wide(inside, x), tried, found)
        low, high = torch.where(inside, share, low), torch.where(inside, high, share)
    return torch.where(_wide(outside, x), found, best)


def _nearest(x: Tensor) -> Tensor:
    return (x * 255).round().clamp(0, 255) / 255


def _wide(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (x.dim() - 1))
