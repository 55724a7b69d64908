"""Attacks without a search, and one in another precision: what others are compared with."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import derived
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat, choose
from lightning_rob.transforms import Transform


@dataclass(frozen=True)
class NoAttack(Attack):
    """Return the images unchanged."""

    ignores_state: ClassVar[bool] = True
    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return x


@dataclass(frozen=True)
class RandomCorners(Attack):
    """The best of some random corners of the ball, without a search."""

    threat: Threat
    tries: int = 10

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        best, lowest = x, x.new_full((len(x),), torch.inf)
        for _ in range(self.tries):
            tried = self.threat.corner(x, generator)
            with torch.no_grad():
                found = defense(tried, generator)
            check_labels(y, found.shape[-1])
            score = found.gather(1, y[:, None])[:, 0].to(lowest)
            wins = score < lowest
            best = choose(wins, tried, best)
            lowest = torch.where(wins, score, lowest)
        return best


@dataclass(frozen=True)
class RandomStart(Attack):
    """One random point of the ball, without a prediction of the defense."""

    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.threat.start(x, generator if isinstance(generator, Streams) else None)


@dataclass(frozen=True)
class CommonCorruption(Attack):
    """Corrupt images by a random transform that does not depend on the defense.

    Args:
        attack: an attack on the corrupted images, around which its ball is; None corrupts alone.
    """

    knowledge: ClassVar[str] = "nothing: images are corrupted whatever the defense"
    transform: Transform
    attack: Attack | None = None

    def __post_init__(self) -> None:
        if self.attack:
            object.__setattr__(self, "knowledge", f"{self.knowledge}; then {self.attack.knowledge}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """All images."""
        return Threat("linf", 1.0)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        corrupted = self.transform(x, *self.transform.sample(x, generator))
        if self.attack is None:
            return corrupted
        return self.attack.perturb(defense, corrupted, y, derived(generator, 0))


@dataclass(frozen=True)
class DoublePrecision(AttackDecorator):
    """An attack that computes in double precision, on a copy of the defense."""

    strategies = Attack.strategies  # the attack sees the copy

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        found = self.attack(doubled(defense), x.double(), y, generator)
        return self.threat.project(found.to(x.dtype), x)


@torch.no_grad()  # with gradients, the copied weights of TorchScript would be no leaves
def doubled(defense: Defense) -> Defense:
    """Return a copy of the defense in double precision."""
    return copy.deepcopy(defense).double()
