"""Attacks on adapting defenses: rehearse the adaptation, attack the adapted models, repeat."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.contexts import evaluating
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.nested import map_attacks
from lightning_rob.attacks.pgd import is_pgd
from lightning_rob.defenses import Defense, Mixture
from lightning_rob.objectives import expected_ce, reduction_of
from lightning_rob.randomness import Generator, generator_from
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class GMSA(Attack):
    """Greedy model space attack (Chen et al. 2022, Algorithm 2); without memory FPA, Algorithm 1.

    In round i the attacker attacks all models collected in earlier rounds, F(0) … F(i), lets a
    rehearsal of the defense adapt to the perturbed images, which gives F(i+1), and evaluates F(i+1)
    on them. The attack returns the images with the lowest rehearsed accuracy, among equals those
    with the largest mean cross-entropy: line 5 of the algorithm takes the largest loss, the
    authors' code counts errors. F(0) is the defense in its current state. Rehearsals draw from the
    attacker's generator, never from the defender's.

    The inner attack's objective combines the models: `expected_ce` is GMSA-AVG, `worst_ce` is
    GMSA-MIN, for which the steps of PGD grow with the number of models. Models run one after the
    other: beyond their weights, memory does not grow with their number.

    Args:
        inner: the attack on the collected models; in the paper a PGD that keeps its best iterate.
        rounds: T + 1, the number of rehearsals on attacked images.
        memory: attack all models collected in earlier rounds; False attacks the last.
        from_clean: rehearse on the clean images first, and return those if all others are worse:
            one more adaptation. The algorithms choose among attacked images only.
    """

    batch_dependent: ClassVar[bool] = True
    rehearses: ClassVar[bool] = True
    made_for: ClassVar[tuple[str, ...]] = ("transductive",)
    knowledge: ClassVar[str] = f"{Attack.knowledge}, and rehearses the adaptation"
    inner: Attack
    rounds: int = 10
    memory: bool = True
    from_clean: bool = True

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds)

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return self.inner.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        models, x_best, best_score = [defense.adapted_model], x, (-1.0, 0.0)
        if self.from_clean:
            _, best_score = self._rehearse(defense, x, y, generator)

        def grown(part: Attack) -> dict[str, Any]:
            # As in the paper, more steps where the least of more models decides.
            if is_pgd(part) and reduction_of(part.objective) == "min":
                return {"steps": part.steps * len(attacked)}
            return {}

        for _ in range(self.rounds):
            # An error of 1 cannot grow; on clean images it may be luck, and the attack goes on.
            if best_score[0] == 1 and x_best is not x:
                break
            attacked = models if self.memory else models[-1:]
            x_adv = map_attacks(self.inner, grown)(Mixture(attacked), x, y, generator)
            model, score = self._rehearse(defense, x_adv, y, generator)
            if score > best_score or (score == best_score and x_best is x):
                x_best, best_score = x_adv, score
            models.append(model)
        return x_best

    def _rehearse(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[Defense, tuple[float, float]]:
        """Adapt the defense to images and return the adapted model with its score (error, loss)."""
        final = defense.adapt(x, generator_from(x, generator))
        with evaluating(final) as copied, torch.no_grad():
            right = copied(x, generator).gather(1, y[:, None])
            loss = ObjectiveGradient(expected_ce).value(copied, x, y, generator)
        aims = self.inner.aimed_at(y)
        right, loss = right[aims], loss[aims]
        # Errors decide; among equal ones the cross-entropy, averaged over draws and images, does.
        return final.adapted_model, (1 - float(right.double().mean()), float(loss.double().mean()))
