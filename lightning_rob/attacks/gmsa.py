"""Attacks on defenses that adapt: rehearse the defense, attack what it became, and again."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack, evaluating
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.rebuild import rebuilt
from lightning_rob.defenses import Defense, Mixture
from lightning_rob.objectives import over_draws
from lightning_rob.randomness import Generator, spawn
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class GMSA(Attack):
    """Greedy model space attack (Chen et al. 2022, Algorithm 1) and, without memory, FPA.

    In round i the attacker attacks all models met so far, F(0) … F(i), lets a rehearsal of the
    defense adapt to the images found, which gives F(i+1), and sees how often that one is right on
    them. The images on which it was right least often are handed in. F(0) is the defense as it
    stands; rehearsals draw from the attacker's generator, never from the defender's.

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
            one more adaptation.

    Raises:
        ValueError: no rounds.
    """

    together: ClassVar[bool] = True
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
        models, best, lowest = [defense.now], x, float("inf")
        if self.from_clean:
            _, lowest = self._rehearse(defense, x, y, generator)
        for _ in range(self.rounds):
            if lowest == 0 and best is not x:
                break
            met = models if self.memory else models[-1:]
            x_adv = self._longer(len(met))(Mixture(met), x, y, generator)
            model, accuracy = self._rehearse(defense, x_adv, y, generator)
            if accuracy < lowest or (accuracy == lowest and best is x):
                best, lowest = x_adv, accuracy
            models.append(model)
        return best

    def _longer(self, models: int) -> Attack:
        """The inner attack with as many steps as so many models deserve."""

        def change(part: Attack) -> dict[str, Any]:
            if not isinstance(part, PGD):
                return {}
            least = over_draws(part.objective) == "least"
            wanted = least if self.steps_per_model is None else self.steps_per_model
            return {"steps": part.steps * models} if wanted else {}

        return rebuilt(self.inner, change)

    @staticmethod
    def _rehearse(
        defense: Defense, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[Defense, float]:
        """What the defense becomes on these images, and how often it is right on them."""
        final = defense.adapt(x, spawn(x, generator))
        with evaluating(final), torch.no_grad():
            right = final(x, generator).gather(1, y[:, None])
        return final.now, float(right.double().mean())
