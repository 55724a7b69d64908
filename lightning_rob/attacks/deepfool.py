"""DeepFool: steps to the nearest decision boundary of the linearised network."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, positions
from lightning_rob.attacks.arc import nearest_boundary
from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.cw import brought_inside
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator
from lightning_rob.rules import expectation
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, scale

CRAWL = 1e-4  # pixel units beyond each boundary, as in the authors' code: more than rounding errors


@dataclass(frozen=True)
class DeepFool(Attack):
    """Small perturbations by linearised boundaries (Moosavi-Dezfooli et al. 2016).

    Each step moves an image to the nearest linearised boundary of the mean logits and a little
    beyond, until the class is wrong. The result is projected into the ball: with a huge eps it is
    returned unchanged. Images that are misclassified from the start are returned unchanged.

    Args:
        threat: the ball and the bounds; linf or l2.
        candidates: number of wrong classes searched for the nearest boundary, those with the
            largest logits; None searches all.
        overshoot: distance beyond the boundary, as a share of each step.
    """

    smallest_norm: ClassVar[bool] = True
    threat: Threat
    steps: int = 50
    candidates: int | None = None
    overshoot: float = 0.02
    draws: int | None = None

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, candidates=self.candidates, draws=self.draws)
        at_least(0, overshoot=self.overshoot)
        check_norm(self, math.inf, 2)

    def cost(self, count: PassCount) -> int:
        gradients = min(self.candidates or count.classes, count.classes - 1)
        return count.drawn(self.draws) * self.steps * (2 + gradients)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        x_adv, active = x.clone(), ActiveBatch(positions(x), x, y, generator)
        for step in range(self.steps):
            with torch.no_grad():
                logits = self._logits(defense, x_adv[active.index], active, check=step == 0)
            # Images that are fooled leave with the perturbation that they have.
            active = active.select((logits.argmax(-1) == active.y).nonzero()[:, 0])
            if not len(active):
                break
            z = x_adv[active.index].requires_grad_()
            logits = self._logits(defense, z, active)
            label = active.y[:, None].long()
            wrong = logits.scatter(-1, label, -torch.inf)
            count = min(self.candidates or logits.shape[-1], logits.shape[-1] - 1)
            gaps = logits.gather(-1, label) - wrong.topk(count).values
            w, distance = nearest_boundary(gaps, z, self.threat, active.generator)
            length = (1 + self.overshoot) * (distance + CRAWL)  # a little beyond the boundary
            moved = z.detach() + scale(self.threat.steepest(-w), length)
            x_adv[active.index] = moved.clamp(*self.threat.bounds)
        return brought_inside(x_adv, x, self.threat)

    def _logits(
        self, defense: Defense, x: Tensor, active: ActiveBatch, check: bool = False
    ) -> Tensor:
        """Return the mean logits over draws: [b, K]."""
        logits, weights = defense.sample_logits(x, active.generator, self.draws)
        if check:
            check_logits(logits, active.y)
        return expectation(weights, logits)
