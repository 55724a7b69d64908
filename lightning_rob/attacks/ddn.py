"""Decoupled direction and norm: the gradient turns the perturbation, success shortens it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.cw import BestSoFar, brought_inside
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pdgd import HALVINGS, shorten
from lightning_rob.attacks.pgd import is_certain
from lightning_rob.defenses import Defense
from lightning_rob.objectives import expected_margin, log_expected_ce
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least, within
from lightning_rob.threat import Threat, divisor, scale

FIRST_STEP, LAST_STEP = 1.0, 0.01  # lengths of the gradient steps, by a cosine, on pixels in [0, 1]


@dataclass(frozen=True)
class DDN(Attack):
    """Smallest l2 perturbation by decoupled direction and norm (Rony et al. 2019, Algorithm 1).

    A step follows the unit gradient of the cross-entropy, taken of its logarithm, which does not
    underflow on a confident network; the perturbation is then rescaled to a norm that falls by the
    factor 1 - gamma where the last iterate succeeded, else grows by 1 + gamma. Fast where the
    boundary is near, as on networks without adversarial training. It ends as `PDGD` does.

    Args:
        steps: number of steps, each of one forward and one backward pass.
        gamma: relative change of the norm in a step.
        first_norm: the norm of the first perturbation, in pixel units. Steps along the gradient
            have lengths of 1 to 0.01, times the range of the bounds.
    """

    smallest_norm: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True  # they decide which iterates count
    threat: Threat
    steps: int = 500
    gamma: float = 0.05
    first_norm: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)
        at_least(0, first_norm=self.first_norm)
        within(0, 1, gamma=self.gamma)
        check_norm(self, 2)

    def cost(self, count: PassCount) -> int:
        return count.networks * (1 + 2 * self.steps + HALVINGS)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if not is_certain(defense, expected_margin):
            raise TypeError(f"DDN is for fixed classifiers, not for {type(defense).__name__}")
        climbed, margin = ObjectiveGradient(log_expected_ce), ObjectiveGradient(expected_margin)
        best = BestSoFar.begin(margin, defense, x, y, generator)
        norm, (low, high) = x.new_full((len(x),), self.first_norm), self.threat.bounds
        run = Walk(positions(x), x, y, derived(generator, 0), x, norm).select(~best.succeeded)
        for step in range(self.steps if len(run) else 0):
            at = climbed(defense, run.x_adv, run.y, run.generator, check=step == 0)
            value = expected_margin(at.logits, at.weights, run.y).to(x)
            best.update(run.index, run.x_adv, self.threat.size(run.x_adv - run.x), value, 0)
            share = (1 + math.cos(math.pi * step / self.steps)) / 2
            length = (LAST_STEP + (FIRST_STEP - LAST_STEP) * share) * (high - low)
            # Success shortens the next perturbation, failure lets it grow; the direction is free.
            factor = torch.where(value > 0, 1 - self.gamma, 1 + self.gamma)
            run.norm = run.norm * factor.to(run.norm)
            farthest = self.threat.size(torch.maximum(run.x - low, high - run.x))
            run.norm = torch.minimum(run.norm, farthest)
            delta = run.x_adv - run.x + length * self.threat.steepest(at.gradient)
            delta = scale(delta, run.norm / divisor(self.threat.size(delta)))
            run.x_adv = (run.x + delta).clamp(low, high)
        shorten(defense, run, best, self.threat, expected_margin)
        return brought_inside(best.x_adv, x, self.threat)


@dataclass
class Walk(ActiveBatch):
    """The iterates and their norms."""

    x_adv: Tensor  # [b, C, H, W] the iterates
    norm: Tensor  # [b] the norms of the next perturbations, before they are cut off at the bounds
