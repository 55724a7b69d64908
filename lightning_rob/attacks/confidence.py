"""Adversarial images that a network is sure of."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pgd import PGD, better
from lightning_rob.defenses import Defense
from lightning_rob.objectives import (
    TargetedMargin,
    confident,
    expected_margin,
    min_confidence,
    reduction_of,
    worst_margin,
)
from lightning_rob.randomness import Generator
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class HighConfidence(Attack):
    """Of many runs the image that is wrong with most confidence (Chen et al. 2022, A.3).

    Made for defenses that minimise the entropy of their answers, such as DENT: what is wrong with
    confidence already stays so. The runs climb the margin of the likeliest wrong class, from fresh
    random starts, and that of each wrong class in turn. The objective of the attack says only what
    is made of several models: their mean, or, for an objective that is the least of them such as
    `worst_ce`, the least.

    Args:
        attack: how the margins are climbed; the paper has 100 steps and keeps the best iterate.
        untargeted: how many runs climb the margin of the likeliest wrong class.
        targeted: how many wrong classes have a run of their own, y + 1, y + 2 … modulo K; None is
            all of them.

    Raises:
        ValueError: no runs, or an objective that is neither a mean nor a least over draws.
    """

    attack: PGD
    untargeted: int = 5
    targeted: int | None = None

    def __post_init__(self) -> None:
        if self.untargeted < 0 or (self.targeted or 0) < 0:
            raise ValueError(
                f"counts of runs must not be negative, got {self.untargeted} and {self.targeted}"
            )
        if self.untargeted == 0 and self.targeted == 0:
            raise ValueError("untargeted and targeted must not both be 0: there would be no run")
        if reduction_of(self.attack.objective) is None:
            raise ValueError(
                "the objective must be a mean or a least over draws, such as expected_ce or "
                f"worst_ce, got {self.attack.objective}"
            )

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        best, value = x, self._confidence(defense, x, y, generator)
        for run in self._runs(self._classes(defense, x, generator)):
            x_adv = run.perturb(defense, x, y, generator)
            reached = self._confidence(defense, x_adv, y, generator)
            best, value = better(best, value, x_adv, reached)
        return best

    @property
    def _least(self) -> bool:
        return reduction_of(self.attack.objective) == "min"

    def _runs(self, classes: int) -> Iterator[PGD]:
        margin = worst_margin if self._least else expected_margin
        for _ in range(self.untargeted):
            yield replace(self.attack, objective=margin)
        count = classes - 1 if self.targeted is None else min(self.targeted, classes - 1)
        for shift in range(1, count + 1):
            yield replace(
                self.attack, objective=TargetedMargin(shift, "min" if self._least else "mean")
            )

    @torch.no_grad()
    def _confidence(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        score = min_confidence if self._least else confident
        evaluate = ObjectiveGradient(score, self.attack.draws)
        return evaluate.value(defense, x, y, generator, check=True)

    @torch.no_grad()
    def _classes(self, defense: Defense, x: Tensor, generator: Generator) -> int:
        return int(defense.sample_logits(x, generator, self.attack.draws)[0].shape[-1])
