"""Corruptions in the place of an attack."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator
from lightning_rob.threat import Threat
from lightning_rob.transforms import Transform


@dataclass(frozen=True)
class CommonCorruption(Attack):
    """What chance or weather does to images, whatever the defense.

    Args:
        transform: `lightning_rob.transforms.corruptions.Brightness` or any other transform.
    """

    knowledge: ClassVar[str] = "nothing: images are corrupted whatever the defense"
    transform: Transform

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """Anything that is an image."""
        return Threat("linf", 1.0)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        return self.transform(x, *self.transform.sample(x, generator))
