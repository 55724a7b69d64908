"""Projected gradient ascent: one loop for FGSM, BIM, PGD, EoT and their momentum variants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, positions
from lightning_rob.attacks.backward import Backward, entered, passes_of
from lightning_rob.attacks.base import Attack, set_step_size
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.optimizers import AggMo, AttackOptimizer
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Loss, expected_ce, linear, losses_of_rule, reduction_of
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Length, Threat, choose, scale


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient ascent on any objective (Madry et al. 2018).

    For l1 a step moves few pixels, those with the largest gradient (SLIDE, Tramèr and Boneh 2019).
    FGSM is one step of size eps without random start, BIM is PGD without random start. Adaptive PGD
    and EoT are the default objective on an ensemble or a random defense. Momentum is
    `momentum=[0.9]`, AggMo (Lucas et al. 2019) is `momentum=[0, 0.9, 0.99]`; see `AggMo`.

    Args:
        step_size: length of a step in pixel units, images span [0, 1]; for a relative threat, as a
            share of the image's norm.
        objective: the objective to maximise, one of `lightning_rob.objectives`.
        restarts: number of runs from fresh random starts; each image keeps its best run by the
            objective.
        keep_best: keep each image's best iterate, the image itself included, not its last one.
        momentum: one coefficient for each velocity, short for `AggMo(momentum)`.
        backward: a context such as SGM, LinBP or InsideBounds, or several, entered in turn with the
            defense.
        ascent: another optimizer of `lightning_rob.attacks.optimizers`, instead of momentum.
        early_stop: return an image as soon as the defense misclassifies it with certainty; it then
            costs no further passes and no restarts. Never raises the accuracy of the attacked
            defense, up to rounding, which depends on the batch size. It may raise that of other
            defenses: leave it out of TAA, OnMember and GMSA. A TypeError where one evaluation does
            not show it. On a GPU each step waits for the previous one.
    """

    lengths: ClassVar[tuple[str, ...]] = ("step_size",)
    takes_radii: ClassVar[bool] = True
    threat: Threat
    steps: int
    step_size: Length
    objective: Loss = expected_ce
    draws: int | None = None
    restarts: int = 1
    random_start: bool = True
    keep_best: bool = False
    momentum: tuple[float, ...] = (0.0,)
    backward: Backward | Sequence[Backward] | None = None
    ascent: AttackOptimizer | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", tuple(self.momentum))
        if isinstance(self.backward, Sequence):
            object.__setattr__(self, "backward", tuple(self.backward))
        at_least(1, steps=self.steps, restarts=self.restarts, draws=self.draws)
        set_step_size(self)
        if AggMo(self.momentum) != AggMo((0.0,)) and self.ascent:
            raise ValueError(f"give momentum {self.momentum} or {self.ascent}, not both")
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"{self.restarts} restarts without random_start are one and the same")

    @property
    def stops_on_gradient_logits(self) -> bool:  # type: ignore[override]
        return self.early_stop

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        if suite_kind == "ensemble":
            return self.objective in losses_of_rule(rule)
        smoothed = len(self.momentum) > 1 or self.ascent is not None
        return suite_kind == "random" and self.objective is linear and smoothed

    def cost(self, count: PassCount) -> int:
        clean, last = self.keep_best and self.random_start, self.keep_best or self.restarts > 1
        step = 2 + passes_of(self.backward)
        return count.drawn(self.draws) * self.restarts * (step * self.steps + clean + last)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if self.early_stop:
            check_certain(defense, self.objective)
        objective = ObjectiveGradient(self.objective, self.draws)
        none = x.new_full((len(x),), -torch.inf)
        x_final, run = torch.empty_like(x), Iterates(positions(x), x, y, generator, x, x, none)
        with entered(self.backward, defense):
            for _ in range(self.restarts):
                # Drawn for the whole batch, also for images that have left.
                start = self.threat.start(x, generator) if self.random_start else x
                run.x_adv = run.rows_of(start)
                if self.keep_best and self.random_start:
                    # The run never visits the image itself, which counts as an iterate too.
                    run.keep_better(run.x, run.value(objective, defense, run.x, check=True))
                # Without momentum AggMo is the steepest direction.
                step_rule = (self.ascent or AggMo(self.momentum)).init(self.threat)
                for step in range(self.steps):
                    at = objective(defense, run.x_adv, run.y, run.generator, check=step == 0)
                    gradient = at.gradient
                    if self.keep_best:
                        run.keep_better(run.x_adv, at.value)
                    if self.early_stop:
                        x_final[run.index] = run.x_adv  # final for the images that leave now
                        rows = (~at.fooled(run.y)).nonzero()[:, 0]
                        run, step_rule = run.select(rows), step_rule.select(rows)
                        gradient = gradient[rows]
                        if not len(run):
                            return x_final
                    # Lengths are shares of each image's unit: its norm, or its own radius.
                    threat = self.threat.of(run.index)
                    if threat.p == 1:  # a sparse step must not be spent on pixels at their bounds
                        gradient = threat.free(gradient, run.x_adv)
                    length = self.step_size * threat.unit(run.x)
                    step_taken = scale(step_rule(gradient), length)
                    run.x_adv = threat.project(run.x_adv + step_taken, run.x)
                if self.keep_best or self.restarts > 1:
                    run.keep_better(run.x_adv, run.value(objective, defense, run.x_adv))
                else:
                    run.best = run.x_adv
        x_final[run.index] = run.best
        return x_final


@dataclass
class Iterates(ActiveBatch):
    """The iterates of the images that are still attacked."""

    x_adv: Tensor  # [b, C, H, W] the current iterates
    best: Tensor  # [b, C, H, W] the best iterates so far
    best_value: Tensor  # [b] their objective; minus infinity at first

    @torch.no_grad()
    def value(
        self, objective: ObjectiveGradient, defense: Defense, x: Tensor, check: bool = False
    ) -> Tensor:
        """Return the objective [b] of candidate images [b, C, H, W]."""
        return objective.value(defense, x, self.y, self.generator, check)

    def keep_better(self, x_adv: Tensor, value: Tensor) -> None:
        """Replace the best iterates of the images whose candidate has a larger objective."""
        self.best, self.best_value = better(self.best, self.best_value, x_adv, value)


def is_pgd(attack: object) -> TypeGuard[PGD]:
    """Whether an attack has PGD's fields: an objective, steps, a random start."""
    return isinstance(attack, PGD)


def better(a: Tensor, value_a: Tensor, b: Tensor, value_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return per image the candidate with the larger objective, and its value; a on ties."""
    wins = value_b > value_a
    return choose(wins, b, a), torch.where(wins, value_b, value_a)


def is_certain(defense: Defense, objective: Loss) -> bool:
    """Return whether one evaluation proves that an image is always misclassified."""
    try:
        check_certain(defense, objective)
    except TypeError:
        return False
    return True


def check_certain(defense: Defense, objective: Loss) -> None:
    """Raise TypeError if one evaluation does not prove that an image is always misclassified."""
    pooled = reduction_of(objective) is None
    if len(defense.components()) > 1 and pooled and defense.rule is random_member:
        raise TypeError(f"early_stop does not see which part of a mixture predicts, by {objective}")
    try:
        _ = defense.classifiers
    except TypeError as error:
        raise TypeError(
            f"early_stop is for a fixed set of classifiers: {type(defense).__name__} draws its "
            "own, and one wrong prediction is no proof"
        ) from error
