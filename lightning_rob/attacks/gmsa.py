"""Attacks on defenses that adapt: rehearse the defense, attack what it became, and again."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack, evaluating, map_attacks
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pgd import PGD
from lightning_rob.defenses import Defense, Mixture
from lightning_rob.objectives import expected_ce, reduction_of
from lightning_rob.randomness import Generator, generator_from
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class GMSA(Attack):
    """Greedy model space attack (Chen et al. 2022, Algorithm 2) and, without memory, FPA.

    (FPA is Algorithm 1.) In round i the attacker attacks all models met so far, F(0) … F(i), lets a
    rehearsal of the defense adapt to the images found, which gives F(i+1), and sees how often that
    one is right on them. The images on which it was right least often are handed in; of equals
    those with the largest mean cross-entropy, which decides rounds of one image. F(0) is the
    defense as it stands; rehearsals draw from the attacker's generator, never from the defender's.

    Line 5 of the algorithm takes the largest loss L; the authors' code counts errors. Both are used
    here in that order, whatever loss the inner attack climbs.

    The inner attack's objective says what is made of the models: `expected_ce` is GMSA-AVG,
    `worst_ce` is GMSA-MIN. Models are seen one after the other, so memory does not grow with their
    number beyond that of their weights.

    Args:
        inner: attacks the models met; a PGD that keeps its best iterate in the paper.
        rounds: T + 1, how often the defense is rehearsed.
        memory: attack all models met so far; False is FPA, which attacks the last one.
        steps_per_model: multiply the steps of each PGD in `inner` by the number of models; None
            does so, as in the paper, where its objective is the least over models.
        from_clean: rehearse on the clean images first, and hand those in if all others are worse:
            one more adaptation. Algorithms 1 and 2 choose among attacked images only.

    Raises:
        ValueError: no rounds.
    """

    batch_dependent: ClassVar[bool] = True
    knowledge: ClassVar[str] = f"{Attack.knowledge}, and rehearses the adaptation"
    inner: Attack
    rounds: int = 10
    memory: bool = True
    steps_per_model: bool | None = None
    from_clean: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The inner attack's."""
        return self.inner.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        models, best, highest = [defense.adapted_model], x, (-1.0, 0.0)
        if self.from_clean:
            _, highest = self._rehearse(defense, x, y, generator)
        for _ in range(self.rounds):
            if highest[0] == 1 and best is not x:
                break
            met = models if self.memory else models[-1:]
            x_adv = self._longer(len(met))(Mixture(met), x, y, generator)
            model, found = self._rehearse(defense, x_adv, y, generator)
            if found > highest or (found == highest and best is x):
                best, highest = x_adv, found
            models.append(model)
        return best

    def _longer(self, models: int) -> Attack:
        """The inner attack with as many steps as so many models deserve."""

        def change(part: Attack) -> dict[str, Any]:
            if not isinstance(part, PGD):
                return {}
            least = reduction_of(part.objective) == "min"
            wanted = least if self.steps_per_model is None else self.steps_per_model
            return {"steps": part.steps * models} if wanted else {}

        return map_attacks(self.inner, change)

    @staticmethod
    def _rehearse(
        defense: Defense, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[Defense, tuple[float, float]]:
        """What the defense becomes on these images, and how wrong it is: its error, then its loss.

        The error is the probability of a wrong answer, the loss the cross-entropy, the mean over
        draws; both are means over the images.
        """
        final = defense.adapt(x, generator_from(x, generator))
        with evaluating(final), torch.no_grad():
            right = final(x, generator).gather(1, y[:, None])
            loss = ObjectiveGradient(expected_ce).value(final, x, y, generator)
        return final.adapted_model, (1 - float(right.double().mean()), float(loss.double().mean()))
