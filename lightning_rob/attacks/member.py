"""Attackers who look at one member of a randomized ensemble only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense, Single
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class OnMember(Attack):
    """Attack one member alone, whichever of them answers in the end (PGD-1 and C&W-1).

    Args:
        attack: what the member is attacked by.
        member: which one, counted from 0.

    Raises:
        ValueError: a negative member; when called, one that the defense has not.
    """

    attack: Attack
    member: int = 0

    def __post_init__(self) -> None:
        if self.member < 0:
            raise ValueError(f"member must be 0 or more, got {self.member}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        members = defense.classifiers
        if self.member >= len(members):
            raise ValueError(f"member must be 0 … {len(members) - 1}, got {self.member}")
        return self.attack.perturb(Single(members[self.member]), x, y, generator)


@dataclass(frozen=True)
class RandomMember(Attack):
    """Attack a member drawn as the defense draws its own (the PGD of the ARC paper, eq. 62).

    Called, it draws one member per image. An evaluation plays all its `strategies` instead and
    weights their outcomes, so that both expectations, over this draw and the defense's, are exact.

    Args:
        attack: what the member is attacked by.
    """

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        """One strategy per member that can answer, with its probability."""
        chances = enumerate(defense.weights.tolist())
        return [(p, OnMember(self.attack, i)) for i, p in chances if p > 0]

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        chances, attacks = zip(*self.strategies(defense), strict=True)
        upper = torch.tensor(chances).cumsum(0)[:-1].to(x)
        drawn = torch.bucketize(uniform(x, generator=generator), upper, right=True)
        x_adv = x.clone()
        for i, attack in enumerate(attacks):
            mine = (drawn == i).nonzero()[:, 0]
            if len(mine):
                part = generator[mine] if isinstance(generator, Streams) else generator
                x_adv[mine] = attack.perturb(defense, x[mine], y[mine], part)
        return x_adv
