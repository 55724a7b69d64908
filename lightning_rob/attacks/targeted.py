"""Attacks that climb towards wrong classes: towards a runner-up, or to high confidence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pgd import PGD, better, is_pgd
from lightning_rob.defenses import Defense
from lightning_rob.objectives import (
    Loss,
    TargetedMargin,
    check_logits,
    confident,
    expected_margin,
    log_mean_probs,
    min_confidence,
    reduction_of,
    worst_margin,
)
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least


@dataclass(frozen=True)
class Targeted(AttackDecorator):
    """Climb towards a runner-up class instead of away from the label (RT paper, "TG").

    The attack climbs its negated objective with the target as label: for `linear` this is the
    target's logit minus the largest other one.

    Args:
        rank: rank of the target among the wrong classes, by the mean probabilities on the clean
            image: 1 is the most probable.
    """

    attack: PGD
    rank: int = 1

    def __post_init__(self) -> None:
        at_least(1, rank=self.rank)
        if not is_pgd(self.attack):
            kind = type(self.attack).__name__
            raise ValueError(f"Targeted takes a PGD, got {kind}: put {kind} around Targeted")
        if self.attack.early_stop:
            raise ValueError(
                "leave early_stop out of the attack in Targeted: its labels are targets"
            )
        if reduction_of(self.attack.objective) == "min":
            raise ValueError(
                "an objective that is the least over models cannot be negated, got "
                f"{self.attack.objective}: HighConfidence has targeted runs for it"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        objective = self.attack.objective
        # Descending the objective of the target as label leads towards the target.
        away = replace(
            self.attack, objective=lambda logits, weights, y: -objective(logits, weights, y)
        )
        with torch.no_grad():
            logits, weights = defense.sample_logits(x, generator, self.attack.draws)
        check_logits(logits, y)
        # as logarithms, which still rank probabilities that round to zero
        scores = log_mean_probs(logits.float() if logits.itemsize < 4 else logits, weights)
        if (wrong := scores.shape[1] - 1) < self.rank:
            raise ValueError(f"rank must be 1 … {wrong} of {wrong + 1} classes, got {self.rank}")
        return away.perturb(defense, x, wrong_classes(scores, y)[:, self.rank - 1], generator)


def wrong_classes(scores: Tensor, y: Tensor) -> Tensor:
    """Return the classes [B, K - 1] other than y [B] by falling score [B, K]."""
    order = scores.argsort(1, descending=True)
    return order[order != y[:, None]].reshape(len(y), scores.shape[1] - 1)


@dataclass(frozen=True)
class HighConfidence(AttackDecorator):
    """Keep, of many runs, the image that is wrong with most confidence (Chen et al. 2022, A.3).

    Made for defenses that minimise the entropy of their predictions, such as DENT: such a defense
    does not correct a confident error. The runs climb the margin of the most probable wrong class,
    from fresh random starts, and then that of each wrong class in turn. The attack's objective only
    decides how several models are combined: by the mean, or by the minimum if the objective is a
    minimum over models, as `worst_ce` is.

    Args:
        attack: the PGD that climbs the margins; the paper takes 100 steps and keeps the best.
        untargeted: number of runs that climb the margin of the most probable wrong class.
        targeted: number of wrong classes with a run of their own, y + 1, y + 2 … modulo K; None for
            all of them.
    """

    attack: PGD
    untargeted: int = 5
    targeted: int | None = None

    def __post_init__(self) -> None:
        at_least(0, untargeted=self.untargeted, targeted=self.targeted)
        if not (self.untargeted or self.targeted is None or self.targeted):
            raise ValueError("untargeted or targeted must be at least 1: no run changes no image")
        if reduction_of(self.attack.objective) is None:
            raise ValueError(
                "the objective must be a mean or a least over draws, such as expected_ce or "
                f"worst_ce, got {self.attack.objective}"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        # An image stays as it is unless a run raises the confidence in a wrong class.
        x_best, best_confidence = x, self._confidence(defense, x, y, generator)
        with torch.no_grad():
            logits, _ = defense.sample_logits(x, generator, self.attack.draws)
        reduction, classes = reduction_of(self.attack.objective) or "mean", logits.shape[-1]
        margin: Loss = worst_margin if reduction == "min" else expected_margin
        count = classes - 1 if self.targeted is None else min(self.targeted, classes - 1)
        objectives = [margin] * self.untargeted
        objectives += [TargetedMargin(offset, reduction) for offset in range(1, count + 1)]
        for objective in objectives:
            run = replace(self.attack, objective=objective)
            x_adv = run.perturb(defense, x, y, generator)
            confidence = self._confidence(defense, x_adv, y, generator)
            x_best, best_confidence = better(x_best, best_confidence, x_adv, confidence)
        return x_best

    @torch.no_grad()
    def _confidence(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        score = min_confidence if reduction_of(self.attack.objective) == "min" else confident
        evaluate = ObjectiveGradient(score, self.attack.draws)
        return evaluate.value(defense, x, y, generator, check=True)
