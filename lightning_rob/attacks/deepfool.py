"""DeepFool: to the nearest boundary, as if the classes were told apart linearly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.arc import nearest_boundary
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.cw import brought_inside
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator, Streams
from lightning_rob.rules import expectation
from lightning_rob.threat import Threat, scale

CRAWL = 1e-4  # beyond each boundary in pixel units, as in the authors' code: rounding errs by less


@dataclass(frozen=True)
class DeepFool(Attack):
    """Small perturbations by linearised boundaries (Moosavi-Dezfooli et al. 2016).

    Each step moves an image to the nearest linearised boundary of the mean logits and a little
    beyond, until the class is wrong. The result is brought into the ball: a huge eps leaves it as
    it is. Images that are answered wrongly stay as they are.

    Args:
        threat: the ball and the bounds; linf or l2.
        steps: at most so many.
        candidates: wrong classes searched for the nearest boundary, those with the largest
            logits; None searches all.
        overshoot: how much further than the boundary, as a share of each step.
        draws: how often a random defense is drawn for each evaluation; None draws once.

    Raises:
        ValueError: a count below 1, a negative overshoot, another norm.
    """

    threat: Threat
    steps: int = 50
    candidates: int | None = None
    overshoot: float = 0.02
    draws: int | None = None

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "candidates": self.candidates, "draws": self.draws}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not self.overshoot >= 0:
            raise ValueError(f"overshoot must not be negative, got {self.overshoot}")
        if self.threat.p not in (2, float("inf")):
            raise ValueError(f"DeepFool is for linf and l2, not for norm {self.threat.norm}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        x_adv, live = x.clone(), torch.arange(len(x), device=x.device)
        for step in range(self.steps):
            with torch.no_grad():
                logits = self._logits(defense, x_adv[live], y[live], generator, check=step == 0)
            rows = (logits.argmax(-1) == y[live]).nonzero()[:, 0]
            live = live[rows]
            if not len(live):
                break
            generator = generator[rows] if isinstance(generator, Streams) else generator
            x_adv[live] = self._step(defense, x_adv[live], y[live], generator)
        return brought_inside(x_adv, x, self.threat)

    def _step(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        z = x.requires_grad_()
        logits = self._logits(defense, z, y, generator)
        index = y[:, None].long()
        wrong = logits.scatter(-1, index, -torch.inf)
        count = min(self.candidates or logits.shape[-1], logits.shape[-1] - 1)
        gaps = logits.gather(-1, index) - wrong.topk(count).values
        w, distance = nearest_boundary(gaps, z, self.threat)
        reach = (1 + self.overshoot) * (distance + CRAWL)
        return (z.detach() + scale(self.threat.steepest(-w), reach)).clamp(*self.threat.bounds)

    def _logits(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool = False
    ) -> Tensor:
        """The mean over draws: [B, K]."""
        logits, weights = defense.sample_logits(x, generator, self.draws)
        if check:
            check_logits(logits, y)
        return expectation(weights, logits)
