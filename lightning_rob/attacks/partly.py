"""Rounds of which a share is not attacked."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.around import AttackDecorator
from lightning_rob.attacks.base import Attack, walk
from lightning_rob.attacks.gmsa import GMSA
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class PartialBatchAttack(AttackDecorator):
    """Attack the last images of a batch only: x~ = [z; attacked] (Goldwasser et al. 2020).

    Which ones these are goes by the batch: one batch is one round.

    Args:
        attack: what the last images are attacked by.
        clean: the share of the batch that is z, its first images.
        natural: what is done to z, such as `CommonCorruption`; None leaves it as it is.

    Raises:
        ValueError: a share outside [0, 1].
        TypeError: an attack that rehearses the whole round.
    """

    batch_dependent: ClassVar[bool] = True
    clean: float = 0.5
    natural: Attack | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.clean <= 1:
            raise ValueError(f"clean must be a share in [0, 1], got {self.clean}")
        if any(isinstance(part, GMSA) for part in walk(self.attack)):
            raise TypeError("GMSA rehearses whole rounds: write GMSA(inner=PartialBatchAttack(…))")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own; with a `natural` of another, whatever is an image."""
        if self.natural is None or self.natural.threat == self.attack.threat:
            return self.attack.threat
        low, high = bounds = self.attack.threat.bounds
        return Threat("linf", high - low, bounds)

    def is_clean(self, y: Tensor) -> Tensor:
        """Which images of a batch are z: labels [B] -> mask [B]."""
        return torch.arange(len(y), device=y.device) < round(self.clean * len(y))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        x_adv, z = x.clone(), self.is_clean(y)
        for rows, attack in ((z, self.natural), (~z, self.attack)):
            if attack and rows.any():
                part = generator[rows] if isinstance(generator, Streams) else generator
                x_adv[rows] = attack.perturb(defense, x[rows], y[rows], part)
        return x_adv
