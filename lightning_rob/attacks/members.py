"""Attacks on one member of a randomized ensemble, and the strongest of several attacks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import rows_of
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.budget import PassCount, shared
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class OnMember(AttackDecorator):
    """Attack one member alone, whichever member predicts (PGD-1 and C&W-1)."""

    member: int = 0
    strategies = Attack.strategies  # the attack sees one member, and that has no members to mix

    def __post_init__(self) -> None:
        at_least(0, member=self.member)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        members = defense.classifiers
        if self.member >= len(members):
            raise ValueError(f"member must be 0 … {len(members) - 1}, got {self.member}")
        return self.attack.perturb(Single(members[self.member]), x, y, generator)


@dataclass(frozen=True)
class RandomMember(AttackDecorator):
    """Attack a member drawn with the defense's probabilities (the PGD of the ARC paper, eq. 62).

    A call draws one member per image. An evaluation runs all `strategies` instead and weights their
    results, which makes both expectations exact: over this draw and over the defense's own.
    """

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        probs = enumerate(defense.weights.tolist())
        return [(p, OnMember(self.attack, i)) for i, p in probs if p > 0]

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        probs, attacks = zip(*self.strategies(defense), strict=True)
        # Without the last sum, which rounding may leave below 1.
        upper = torch.tensor(probs).cumsum(0)[:-1].to(x)
        drawn = torch.bucketize(uniform(x, generator=generator), upper, right=True)
        x_adv = x.clone()
        for i, attack in enumerate(attacks):
            rows = (drawn == i).nonzero()[:, 0]
            if len(rows):
                noise = rows_of(generator, rows)
                with restricted_to(defense, rows):
                    x_adv[rows] = attack.perturb(defense, x[rows], y[rows], noise)
        return x_adv


@dataclass(frozen=True)
class Strongest(Attack):
    """Keep, per image, the attack that leaves the lowest probability of a right prediction.

    Attacks run in turn, each only on images that may still be predicted right; the earlier attack
    wins ties. On a random defense a single draw decides, and the choice itself is noisy.
    """

    attacks: tuple[Attack, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "attacks", tuple(self.attacks))
        threats = {attack.threat for attack in self.attacks}
        if len(threats) != 1:
            raise ValueError(f"attacks must share one threat, got {sorted(map(str, threats))}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return self.attacks[0].threat

    def cost(self, count: PassCount) -> int:
        return sum(attack.cost(count) + count.networks for attack in self.attacks)

    def least(self, count: PassCount) -> int:
        return sum(attack.least(count) + count.networks for attack in self.attacks)

    def within(self, passes: int, count: PassCount) -> "Strongest":
        left = self.affordable(passes, count) - len(self.attacks) * count.networks
        return replace(self, attacks=tuple(shared(self.attacks, left, count)))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if defense.transductive:
            raise TypeError(
                f"{type(defense).__name__} adapts to whole batches: Strongest cannot pick image by "
                "image; let RobustEval play the attacks one by one"
            )
        best = Best(x.clone(), x.new_full((len(x),), torch.inf))
        for turn, attack in enumerate(self.attacks):
            best.improve(attack, turn, defense, x, y, generator)
        return best.x_adv


@dataclass
class Best:
    """The best image of each so far, and the probability of a right prediction there."""

    x_adv: Tensor  # [B, C, H, W]
    right: Tensor  # [B]; infinite at first

    def improve(
        self,
        attack: Attack,
        turn: int,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
    ) -> None:
        """Attack the images that may still be predicted right, and keep what is better."""
        active = (self.right > 0).nonzero()[:, 0]  # no attack can do better than 0
        if not len(active):
            return
        noise = generator
        if isinstance(generator, Streams):  # the same attack twice has two random starts
            noise = generator[active].fold_in(turn) if turn else generator[active]
        with restricted_to(defense, active):
            x_adv = attack.perturb(defense, x[active], y[active], noise)
            with torch.no_grad():
                right = defense(x_adv, noise).gather(1, y[active, None])[:, 0].to(self.right)
        wins = right < self.right[active]
        self.x_adv[active[wins]], self.right[active[wins]] = x_adv[wins], right[wins]
