"""Attacks that aim at one wrong class (TG)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pgd import PGD, better
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Objective, reduction_of
from lightning_rob.randomness import Generator
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class Targeted(Attack):
    """Climb towards a runner-up instead of away from the label (RT paper, "TG").

    What is climbed is the negated objective with the target as label: of `linear` the target's
    logit minus the largest other one.

    Args:
        attack: how.
        rank: which wrong class, by the mean probabilities on the clean image: 1 is the likeliest;
            of several ranks, each attacked in turn, the best by the attack's own objective is kept
            per image.

    Raises:
        ValueError: no rank or one below 1, an objective that is the least over models, or
            `early_stop`; when called, there are not so many wrong classes.
    """

    attack: PGD
    rank: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int):
            object.__setattr__(self, "rank", tuple(self.rank))
        if not isinstance(self.attack, PGD):
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
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"ranks must be at least 1, got {self.rank}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return (self.rank,) if isinstance(self.rank, int) else tuple(self.rank)

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        climb = replace(self.attack, objective=_towards(self.attack.objective))
        wrong = self._wrong(defense, x, y, generator)
        best, value = x, x.new_full((len(x),), -torch.inf)
        for rank in self.ranks:
            x_adv = climb.perturb(defense, x, wrong[:, rank - 1], generator)
            if len(self.ranks) == 1:
                return x_adv
            with torch.no_grad():
                reached = self._height(self.attack.objective, defense, x_adv, y, generator)
            best, value = better(best, value, x_adv, reached.to(value))
        return best

    @torch.no_grad()
    def _wrong(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """The wrong classes [B, K - 1] of each image, the likeliest first."""
        scores = self._height(_log_mean_probs, defense, x, y, generator)
        if (wrong := scores.shape[1] - 1) < max(self.ranks):
            raise ValueError(f"rank must be 1 … {wrong} of {wrong + 1} classes, got {self.rank}")
        order = scores.argsort(1, descending=True)
        return order[order != y[:, None]].reshape(len(x), wrong)

    def _height(
        self, objective: Objective, defense: Defense, x: Tensor, y: Tensor, generator: Generator
    ) -> Tensor:
        evaluate = ObjectiveGradient(objective, self.attack.draws)
        return evaluate.value(defense, x, y, generator, check=True)


def _log_mean_probs(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """[B, K]; logarithms tell runners-up apart where probabilities round to zero."""
    share = weights.to(logits).log()[:, None, None]
    return (logits.log_softmax(-1) + share).logsumexp(0)


def _towards(objective: Objective) -> Objective:
    def towards(logits: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        return -objective(logits, weights, target)

    return towards
