"""Projected gradient ascent, one loop for all its names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack, Backward, entered, height, slope
from lightning_rob.attacks.optimizers import AggMo, Ascent
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Objective, expected_ce, over_draws
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.threat import Threat, pixels, scale


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient ascent on any objective (Madry et al. 2018).

    FGSM is one step of size eps without random start, BIM is PGD without random start, adaptive
    PGD and EoT are the default objective on an ensemble or a random defense, momentum is
    `momentum=[0.9]` (like MI-FGSM, but it accumulates steepest directions, not gradients of unit
    1-norm), AggMo (Lucas et al. 2019) is `momentum=[0, 0.9, 0.99]`.

    Args:
        threat: the ball and the bounds.
        steps: number of gradient steps.
        step_size: length of a step in pixel units, images span [0, 1]; where the threat is
            relative, as a share of the image's norm.
        objective: what is climbed, one of `lightning_rob.objectives`.
        draws: how often a random defense is drawn per step; None draws once.
        restarts: runs from fresh random starts; the best by the objective is kept per image.
        random_start: start from a random point of the ball instead of the image.
        keep_best: keep each image's best iterate (the image itself included), not the last one.
        momentum: one velocity per number, v <- damping * v + steepest(gradient); the step is the
            mean of their steepest directions: short for `AggMo(momentum)`.
        backward: a context such as SGM, LinBP or InsideBounds, or several, entered in turn with the
            defense.
        ascent: any other optimiser of `lightning_rob.attacks.optimizers`, instead of momentum.
        early_stop: an image that the defense certainly gets wrong is handed in as it is then, and
            costs nothing any more, nor does it start again. The accuracy of what is attacked never
            rises but for rounding, which depends on how many images share a batch; that of others
            may: leave it out of TAA, OnMember and rehearsals. On a GPU each step waits for the last
            one.

    Raises:
        TypeError: when called, fooled images are to be dropped and there is chance in the answers,
            or the objective does not see which part of a mixture answers.
        ValueError: a count below 1, a step size that is not positive, a damping outside [0, 1],
            both momentum and another optimiser.
    """

    lengths: ClassVar[tuple[str, ...]] = ("step_size",)
    threat: Threat
    steps: int
    step_size: float
    objective: Objective = expected_ce
    draws: int | None = None
    restarts: int = 1
    random_start: bool = True
    keep_best: bool = False
    momentum: tuple[float, ...] = (0.0,)
    backward: Backward | Sequence[Backward] | None = None
    ascent: Ascent | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_size", pixels(self.step_size))
        object.__setattr__(self, "momentum", tuple(self.momentum))
        if isinstance(self.backward, Sequence):
            object.__setattr__(self, "backward", tuple(self.backward))
        counts = {"steps": self.steps, "restarts": self.restarts, "draws": self.draws}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not self.step_size > 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if AggMo(self.momentum) != AggMo((0.0,)) and self.ascent:
            raise ValueError(f"give momentum {self.momentum} or {self.ascent}, not both")
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"{self.restarts} restarts without random_start are one and the same")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        if self.early_stop:
            _check_certain(defense, self.objective)
        with entered(self.backward, defense):
            value = x.new_full((len(x),), -torch.inf)
            best, value = self._run(defense, x, y, generator, value)
            for _ in range(self.restarts - 1):
                if self.early_stop and bool(value.isposinf().all()):
                    break
                again, other = self._run(defense, x, y, generator, value)
                best, value = better(best, value, again, other)
        return best

    def _run(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The images of one run [B, …] and their objective [B], where anybody asks for it.

        The objective counts as infinite where `early_stop` found an image fooled; so it does in
        `before` [B], of earlier runs.
        """
        x_adv = self.threat.start(x, generator) if self.random_start else x
        best, value = x, x.new_full((len(x),), -torch.inf)
        if self.keep_best and self.random_start:
            value = self._value(defense, x, y, generator, check=True)
        reach = self.step_size * self.threat.unit(x)
        move = (self.ascent or AggMo(self.momentum)).begin(self.threat)
        live = (before < torch.inf).nonzero()[:, 0] if self.early_stop else None
        for step in range(self.steps):
            climbed, gradient, live = self._slope(defense, x_adv, y, generator, live, step == 0)
            if self.keep_best or self.early_stop:
                best, value = better(best, value, x_adv, climbed)
            if live is not None and not len(live):
                break
            along = scale(move(gradient.nan_to_num(0.0, 0.0, 0.0)), reach)
            x_adv = self.threat.project(x_adv + along, x)
        if self.keep_best or self.restarts > 1:
            last = self._value(defense, x_adv, y, generator)
        else:
            last = torch.zeros_like(value)
        kept = self.keep_best or self.early_stop
        return better(best, value, x_adv, last) if kept else (x_adv, last)

    def _slope(
        self,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        live: Tensor | None,
        check: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The objective [B], its gradient [B, …], and the indices of the images still attacked."""
        see = partial(slope, self.objective, self.draws, defense)
        if live is None:
            return *see(x, y, generator, check), None
        seen: list[Tensor] = []
        climbed, gradient = x.new_full((len(x),), -torch.inf), torch.zeros_like(x)
        if not len(live):
            return climbed, gradient, live
        height_, gradient[live] = see(x[live], y[live], None, check, seen)
        fooled = torch.stack(seen).amax(0) <= 0
        if self.keep_best:
            climbed[live] = height_
        climbed[live] = climbed[live].masked_fill(fooled, torch.inf)
        return climbed, gradient, live[~fooled]

    @torch.no_grad()
    def _value(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool = False
    ) -> Tensor:
        return height(self.objective, self.draws, defense, x, y, generator, check)


def better(a: Tensor, value_a: Tensor, b: Tensor, value_b: Tensor) -> tuple[Tensor, Tensor]:
    """Per image, whichever of two has the larger objective; the first one on ties."""
    wins = value_b > value_a
    return torch.where(wins.view(-1, *[1] * (a.dim() - 1)), b, a), torch.where(
        wins, value_b, value_a
    )


def _check_certain(defense: Defense, objective: Objective) -> None:
    """Raise TypeError where what the objective sees does not tell who is certainly fooled."""
    pooled = not over_draws(objective)
    if defense.kind == "mixture" and pooled and defense.rule is random_member:
        raise TypeError(f"early_stop does not see who of a mixture answers, by {objective}")
    try:
        _ = defense.classifiers
    except TypeError as error:
        raise TypeError(
            f"early_stop is for a fixed set of classifiers: {type(defense).__name__} draws its "
            "own, and one wrong answer is no proof"
        ) from error
