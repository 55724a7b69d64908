"""The smallest radius at which an attack succeeds, searched for each image."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.attacks.pgd import is_certain
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_labels, expected_ce
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import ThreatPerImage


@dataclass(frozen=True)
class MinimalNorm(AttackDecorator):
    """Search the smallest radius at which an attack succeeds, by bisection for each image.

    The first radius is eps of the attack's threat: the accuracy within eps is that of the attack
    itself, and images that it does not fool there are returned as it leaves them. For the others
    each further radius is the middle between the distance of the best image found and the largest
    radius without success. The steps of the attack keep their share of the radius. An image is
    fooled if the defense predicts it correctly with probability 0.

    Args:
        attack: PGD or APGD; with `early_stop` it costs less and often finds an image closer than
            the radius.
        radii: number of radii: the error is eps / 2^(radii - 1) where the attack never fails.
    """

    effort: ClassVar[str] = "radii"
    smallest_norm: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True  # rounded, they would end a search too early
    radii: int = 12

    def __post_init__(self) -> None:
        at_least(1, radii=self.radii)
        if not self.attack.takes_radii:
            kind = type(self.attack).__name__
            raise TypeError(f"MinimalNorm searches the radius of PGD or APGD, not of {kind}")

    def cost(self, count: PassCount) -> int:
        return count.networks + self.radii * (self.attack.cost(count) + count.networks)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if not is_certain(defense, expected_ce):
            kind = type(defense).__name__
            raise TypeError(f"MinimalNorm is for fixed classifiers, not for {kind}")
        x_adv, y, eps = x.clone(), y.long(), self.threat.eps
        if not eps:
            return x_adv
        old = self.threat
        everyone = Search(positions(x), x, y, derived(generator, 0), *x.new_zeros((2, len(x))))
        run = everyone.select(~_is_fooled(defense, x, everyone))
        run.high = run.high + eps
        for number in range(self.radii):
            if not len(run):
                break
            radius = (run.low + run.high) / 2 if number else run.high
            noise = derived(run.generator, number + 1)
            # All lengths of the attack become as much shorter as the radius.
            shares = radius / eps
            threat = ThreatPerImage(old.norm, eps, old.bounds, old.relative, radii=shares)
            within: Attack = replace(self.attack, threat=threat)  # type: ignore[type-var]
            found = within.perturb(defense, run.x, run.y, noise)
            fooled = _is_fooled(defense, found, run)
            distance = self.threat.distance(found, run.x).masked_fill(~fooled, torch.inf)
            # At the full radius all are kept: there the result is the attack's own.
            kept = distance < run.high if number else torch.ones_like(fooled)
            x_adv[run.index[kept]] = found[kept]
            run.low = torch.where(distance.isinf(), radius, run.low)
            run.high = torch.minimum(run.high, distance)
            # an image closer than a radius without success: the attack had failed there
            run.low = run.low.masked_fill(run.low >= run.high, 0)
            # Images that survive the full radius have no smaller one: they keep their result.
            run = run if number else run.select(fooled)
        return x_adv


@dataclass
class Search(ActiveBatch):
    """The images whose radius is searched."""

    low: Tensor  # [b] the largest radii without success; 0 before the first
    high: Tensor  # [b] the distances of the best images


@torch.no_grad()
def _is_fooled(defense: Defense, x_adv: Tensor, run: Search) -> Tensor:
    """Return the images [b] that the defense predicts correctly with probability 0."""
    predictions = defense(x_adv, run.generator)
    check_labels(run.y, predictions.shape[-1])
    return predictions.gather(1, run.y[:, None])[:, 0] <= 0
