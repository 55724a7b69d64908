"""Auto-PGD: projected gradient ascent that chooses its own step sizes."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack, check_norm, may_leave
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.foreign import scores_of
from lightning_rob.attacks.gradient import ObjectiveAt, ObjectiveGradient
from lightning_rob.attacks.pgd import better, is_certain
from lightning_rob.attacks.targeted import wrong_classes
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.objectives import Loss, expected_ce, losses_of_rule, targeted_dlr
from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.rules import Rule
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, choose, divisor, scale, signs_of_largest

ALPHA = 0.75  # share of the gradient step in a move; the rest is the previous move
RHO = 0.75  # a step size stays if at least this share of the last moves raised the objective
SHORT = 25  # steps of a run for l1, where many runs are taken
WIDE = (3.0, 2.0)  # radii of the balls in which a run for l1 begins, in units of eps


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD (Croce and Hein 2020a, Algorithm 1): no step size to choose.

    z = P(x_k + eta steepest(gradient)),
    x_k+1 = P(x_k + alpha (z - x_k) + (1 - alpha) (x_k - x_k-1)),
    with eta = 2 eps at first. At checkpoints w_j, eta is halved and the best iterate continued from
    if no more than rho of the moves since w_j-1 raised the objective, or if neither eta nor the
    best value has changed since. The start is random, on the surface of the ball.

    An image is returned where the defense predicts it correctly with probability 0, else at the
    best value of the objective, the clean image included. A defense that draws its classifiers
    anew, for which one wrong prediction is no proof, is attacked to the end on all images.

    For l1 it is l1-APGD (Croce and Hein 2021): a step, of length eps at first and without momentum,
    moves the pixels of the largest gradient, two thirds as many as the best iterate has moved. A
    run climbs in balls of three and two times the radius, each for three tenths of the steps, and
    goes on from there within the radius.

    Args:
        threat: the ball and the bounds; linf, l2 or l1.
        objective: the objective to maximise, of `lightning_rob.objectives`.
        targets: number of wrong classes, by falling score of the clean image, towards each of which
            a run of its own climbs the targeted DLR loss; the objective then only decides which run
            is kept. 0 climbs the objective. With more than there are, all wrong classes.
        restarts: number of runs from fresh random starts, of each target.
        early_stop: return an image as soon as the defense misclassifies it with certainty, also as
            it is; it then costs no further passes. Otherwise its run goes on, and ends at the last
            misclassified iterate, as in the authors' code: turn it off where the images are to fool
            another defense (`TransferFromStatic`, `OnMember`).
    """

    takes_radii: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True  # they decide which iterate is returned
    threat: Threat
    steps: int = 100
    objective: Loss = expected_ce
    targets: int = 0
    restarts: int = 1
    draws: int | None = None
    early_stop: bool = True

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, restarts=self.restarts, draws=self.draws)
        at_least(0, targets=self.targets)
        check_norm(self, math.inf, 2, 1)

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        return suite_kind == "ensemble" and self.objective in losses_of_rule(rule)

    def cost(self, count: PassCount) -> int:
        runs = self.restarts * (min(self.targets, count.classes - 1) if self.targets else 1)
        # Each phase also evaluates its start, and the last one the value of its end.
        run = sum(2 * (steps + 1) for _, steps in self._phases(self.threat)) + (self.targets > 0)
        return count.drawn(self.draws) * (2 + runs * run)

    def with_effort(self, effort: int) -> Self:
        """Return the attack with this number of steps, which for l1 are those of short runs.

        In l1 a run settles early on the pixels that it moves: another start finds more than more
        steps.
        """
        if self.threat.p != 1:
            return replace(self, steps=effort)
        runs = max(effort // SHORT, 1)
        return replace(self, steps=effort // runs, restarts=runs)

    def _phases(self, threat: Threat) -> list[tuple[Threat, int]]:
        """Return the balls in which a run climbs one after the other, and the steps in each."""
        wide = min(math.ceil(0.3 * self.steps), (self.steps - 1) // 2) if threat.p == 1 else 0
        balls = [replace(threat, eps=radius * threat.eps) for radius in WIDE if wide]
        return [*((ball, wide) for ball in balls), (threat, self.steps - len(balls) * wide)]

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        y, certain = y.long(), is_certain(defense, self.objective)
        everyone = ActiveBatch(positions(x), x, y, derived(generator, 0))
        objective = ObjectiveGradient(self.objective, self.draws)
        clean = objective(defense, x, y, everyone.generator, check=True)
        order = wrong_classes(scores_of(clean.logits, clean.weights, defense.rule), y)
        best, best_value = x.clone(), _finite(clean.value, x)
        if certain and self.early_stop:
            # No run attacks images that are misclassified as they are.
            best_value = best_value.masked_fill(clean.fooled(y), torch.inf)
        kind = SparseAscent if self.threat.p == 1 else Ascent
        wrong, leaves = order.shape[1], may_leave(defense)
        ranks = range(min(self.targets, wrong)) if self.targets else [None]
        runs = [rank for rank in ranks for _ in range(self.restarts)]
        for number, rank in enumerate(runs, 1):
            unfooled = best_value < torch.inf
            if not unfooled.any():
                break
            left = everyone.select(unfooled if leaves else torch.ones_like(unfooled))
            noise, rows = derived(left.generator, number), left.index
            threat = self.threat.of(rows)
            target = None if rank is None else order[rows, rank]
            phases = self._phases(threat)
            start = surface_point(phases[0][0], left.x, noise)
            for ball, steps in phases:
                if ball.p == 1:
                    start = ball.project(start, left.x)
                run = kind.begin(left, noise, start, ball, target)
                with restricted_to(defense, rows):
                    found = self._ascend(defense, run, certain and ball is threat, ball, steps)
                start = found[0]
            best[rows], best_value[rows] = better(best[rows], best_value[rows], *found)
        return best

    def _ascend(
        self, defense: Defense, run: "Ascent", certain: bool, threat: Threat, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return the last images [b, …] of a run and their values [b], infinite if they fool."""
        x_adv, value = run.x.clone(), torch.full_like(run.value, torch.inf)
        checks = run.checkpoints(steps)
        leaves = self.early_stop and certain and may_leave(defense)
        objective = ObjectiveGradient(self.objective, self.draws)
        for step in range(steps + 1):
            loss = self.objective if run.target is None else targeted_dlr(run.target)
            climbed = ObjectiveGradient(loss, self.draws)
            check = step == 0 and run.target is not None
            with restricted_to(defense, run.index):
                at = climbed(defense, run.x_adv, run.y, run.generator, check)
            run.observe(at, first=step == 0)
            if certain:
                fooled = at.fooled(run.y)
                run.fooling = choose(fooled, run.x_adv, run.fooling)
                run.fools = run.fools | fooled
            if leaves:
                x_adv[run.index] = run.fooling  # final for the images that leave now
                run = run.select(~run.fools)
                if not len(run):
                    break
            if step in checks:
                run.reconsider_step_size(checks[step])
            if step < steps:
                run.move(threat.of(run.index), ALPHA if step else 1.0)
        if not len(run):
            return x_adv, value
        # Values of the loss towards other targets do not compare.
        if run.target is not None and threat.eps == self.threat.eps:
            with torch.no_grad(), restricted_to(defense, run.index):
                run.best_value = objective.value(defense, run.best, run.y, run.generator)
        x_adv[run.index] = choose(run.fools, run.fooling, run.best)
        value[run.index] = _finite(run.best_value, run.x).masked_fill(run.fools, torch.inf)
        return x_adv, value


@dataclass
class Ascent(ActiveBatch):
    """The state of a run, of the images that it still attacks."""

    x_adv: Tensor  # [b, C, H, W] the current iterates, x_k
    previous: Tensor  # [b, C, H, W] the iterates before, x_k-1
    gradient: Tensor  # [b, C, H, W] at the current iterates
    best: Tensor  # [b, C, H, W] the best iterates
    best_gradient: Tensor  # [b, C, H, W] at the best iterates
    best_value: Tensor  # [b] the objective there
    step_size: Tensor  # [b] eta, in units of the threat's radius
    value: Tensor  # [b] the objective after the last move
    rises: Tensor  # [b] moves since the last checkpoint that raised the objective
    best_before: Tensor  # [b] the best value at the last checkpoint
    halved: Tensor  # [b] whether the last checkpoint halved the step size
    fooling: Tensor  # [b, C, H, W] the last iterates that fooled
    fools: Tensor  # [b] whether there is one
    target: Tensor | None  # [b] the classes climbed towards, if any

    @classmethod
    def begin(
        cls, left: ActiveBatch, noise: Generator, start: Tensor, threat: Threat, to: Tensor | None
    ) -> "Ascent":
        """Begin a run on the images that are left, from their starts, towards classes or none."""
        x, step_size = left.x, 2 * threat.eps
        zero, zeros = torch.zeros_like(x), x.new_zeros(len(x))
        never = zeros - torch.inf
        images = (start, start, zero, start, zero)
        # the authors' code compares the value after the first move with 0, and so does this
        numbers = (never, zeros + step_size, zeros, zeros, never, zeros == 0)
        state = (*images, *numbers, x, zeros > 0, to)
        return cls(positions(x), x, left.y, noise, *state)

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        """Return the checkpoints w_j and the moves since the one before, as the authors round."""
        # The first interval is 0.22 of the steps, each is 0.03 shorter than the last, or 0.06.
        moves, shortest, shrink = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
        found, at = {}, moves
        while at <= steps:
            found[at] = moves
            moves = max(moves - shrink, shortest)
            at += moves
        return found

    def observe(self, at: ObjectiveAt, first: bool) -> None:
        """Take in the gradients and values of the current iterates."""
        self.gradient = at.gradient
        self.best_gradient, _ = better(self.best_gradient, self.best_value, self.gradient, at.value)
        self.best, self.best_value = better(self.best, self.best_value, self.x_adv, at.value)
        if first:
            self.best_before = self.best_value
        else:
            self.rises = self.rises + (at.value > self.value)
            self.value = at.value

    def reconsider_step_size(self, moves: int) -> None:
        """Halve the step sizes that no longer help, after this number of moves."""
        # Neither the step size nor the best value has changed since the last checkpoint.
        stuck = ~self.halved & (self.best_before >= self.best_value)
        self.halved = (self.rises <= RHO * moves) | stuck
        self.best_before, self.rises = self.best_value, torch.zeros_like(self.rises)
        self.step_size = torch.where(self.halved, self.step_size / 2, self.step_size)
        # With a smaller step size the run continues from its best iterate.
        self.x_adv = choose(self.halved, self.best, self.x_adv)
        self.gradient = choose(self.halved, self.best_gradient, self.gradient)

    def move(self, threat: Threat, alpha: float) -> None:
        """Move to the next iterates."""
        length = self.step_size * threat.unit(self.x)
        z = threat.project(self.x_adv + scale(threat.steepest(self.gradient), length), self.x)
        move = alpha * (z - self.x_adv) + (1 - alpha) * (self.x_adv - self.previous)
        self.previous, self.x_adv = self.x_adv, threat.project(self.x_adv + move, self.x)


@dataclass
class SparseAscent(Ascent):
    """The state of a run for l1, whose steps move few pixels."""

    longest: float  # the first step size
    support: Tensor  # [b] how many pixels the best iterates had moved at the last checkpoint

    @classmethod
    def begin(
        cls, left: ActiveBatch, noise: Generator, start: Tensor, threat: Threat, to: Tensor | None
    ) -> "SparseAscent":
        run, moved = Ascent.begin(left, noise, start, threat, to), _moved(start, left.x)
        run.step_size = run.step_size / 2
        return cls(**vars(run), longest=threat.eps, support=moved)

    @staticmethod
    def checkpoints(steps: int) -> dict[int, int]:
        moves = max(int(0.04 * steps), 1)
        return dict.fromkeys(range(moves, steps + 1, moves), moves)

    def reconsider_step_size(self, moves: int) -> None:
        """Shorten the steps; if the best iterates grow sparser, go on from these by long ones."""
        moved = _moved(self.best, self.x)
        sparser = moved < 0.95 * self.support
        shorter = (self.step_size / 1.5).clamp_min(self.longest / 10)
        self.step_size, self.support = shorter.masked_fill(sparser, self.longest), moved
        self.x_adv = choose(sparser, self.best, self.x_adv)
        self.gradient = choose(sparser, self.best_gradient, self.gradient)

    def move(self, threat: Threat, alpha: float) -> None:
        share = self.support / self.x[0].numel() / 1.5
        length = self.step_size * threat.unit(self.x)
        step = scale(signs_of_largest(self.gradient, share), length)
        self.x_adv = threat.project(self.x_adv + step, self.x)


def _moved(x_adv: Tensor, x: Tensor) -> Tensor:
    """Return how many values [b] of each image have changed."""
    return (x_adv != x).flatten(1).sum(1)


def surface_point(threat: Threat, x: Tensor, generator: Generator = None) -> Tensor:
    """Draw images [B, …] on the surface of the ball."""
    if threat.p == 1:
        return threat.project(x + normal(x, *x.shape[1:], generator=generator), x)
    if threat.p == math.inf:
        direction = 2 * uniform(x, *x.shape[1:], generator=generator) - 1
    else:
        direction = normal(x, *x.shape[1:], generator=generator)
    delta = scale(direction, threat.radius(x) / divisor(threat.size(direction), 1e-12))
    return threat.apply(threat.confine(delta, x), x)


def _finite(value: Tensor, x: Tensor) -> Tensor:
    """Return the objective [B] without infinities, which stand for images x that fool."""
    return value.to(x).clamp_max(torch.finfo(x.dtype).max)
