"""The attack of Carlini and Wagner: the smallest l2 perturbation that fools."""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, rows_of
from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.sight import hooked
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Loss, expected_margin
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import NoGradientError, at_least
from lightning_rob.threat import Threat, choose, guard

# The range of tanh is twice the bounds, and w is kept where the image is within them. If the range
# were the bounds, black and white pixels would hardly have a gradient: 100 steps of 0.01 would
# then fail on four digits in ten.
STRETCH = 2.0
LIMIT = math.atanh(1 / STRETCH)
PROGRESS = 0.9999  # ratio of costs, a tenth of the steps apart, that still counts as falling


@dataclass
class BestSoFar:
    """Per image the smallest perturbation that succeeds or, without one, the nearest to success."""

    x_adv: Tensor  # [B, …] the perturbed images
    distance: Tensor  # [B] their distances; infinite without a success
    value: Tensor  # [B] their objectives
    succeeded: Tensor  # [B] the images with a success since this was last reset

    @classmethod
    def begin(
        cls,
        evaluate: ObjectiveGradient,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        threshold: float = 0,
    ) -> Self:
        """Start at the clean images [B, …]; images above the threshold have succeeded."""
        with torch.no_grad():
            value = evaluate.value(defense, x, y, generator, check=True).to(x)
        fooled = value > threshold
        distance = torch.full_like(value, torch.inf).masked_fill(fooled, 0)
        return cls(x.clone(), distance, value, fooled)

    def update(
        self, index: Tensor, x_adv: Tensor, distance: Tensor, value: Tensor, threshold: float
    ) -> None:
        """Keep the better candidates, in the rows `index`; success is a value above threshold."""
        success = value > threshold
        smaller = success & (distance < self.distance[index])
        nearer = ~success & self.distance[index].isinf() & (value > self.value[index])
        wins, distance = smaller | nearer, distance.masked_fill(~success, torch.inf)
        # Selected without a list of the rows, whose length a GPU would have to report.
        self.x_adv[index] = choose(wins, x_adv, self.x_adv[index])
        self.value[index] = torch.where(wins, value, self.value[index])
        self.distance[index] = torch.where(wins, distance, self.distance[index])
        self.succeeded[index] |= success


@dataclass
class BatchedAdam(ActiveBatch):
    """Adam (Kingma and Ba 2015) on the images whose cost still falls."""

    const: Tensor  # [b] the weights c of the objective
    origin: Tensor  # [b, …] the images as the tanh of their w, with its rounding errors
    w: Tensor  # [b, …] the variables of the search
    mean: Tensor  # [b, …] running mean of the gradients
    square: Tensor  # [b, …] running mean of the gradients' squares
    cost: Tensor  # [b] the sum of costs since the last check
    previous_cost: Tensor  # [b] the sum of costs before the last check


def adam_step(
    gradient: Tensor, mean: Tensor, square: Tensor, step_size: float, count: int
) -> tuple[Tensor, Tensor]:
    """Update Adam's running means in place; return step number `count` and its divisor."""
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.001)
    # The running means are corrected for their start at zero.
    root = (square / (1 - 0.999**count)).sqrt_()
    root.add_(guard(root, 1e-8))
    return (mean / root).mul_(step_size / (1 - 0.9**count)), root


def brought_inside(x_adv: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """Project images outside the ball onto it; return the others bit by bit as they are: [B, …]."""
    inside = threat.distance(x_adv, x) <= threat.eps
    return choose(inside, x_adv.clamp(*threat.bounds), threat.project(x_adv, x))


@dataclass(frozen=True)
class CW(Attack):
    """Smallest l2 perturbation by descent on ||delta||^2 + c h (Carlini and Wagner 2017).

    h is the shortfall of the objective from `confidence`, c is searched for each image, and pixels
    are the tanh of the variables of Adam. The smallest perturbation found is projected into the
    ball: with a huge eps it is returned unchanged, as are images that the objective counts as
    fooled. On an ensemble the mean must succeed: with confidence 0 some members stay correct.

    Args:
        steps: Adam steps for one c; fewer for images whose cost stops falling.
        step_size: Adam's learning rate, on the scale of tanh's argument; from 0.1 on it is too
            coarse for most images.
        binary_steps: number of values of c; c grows tenfold until it succeeds, then the interval is
            halved.
        confidence: the value that the objective must exceed to succeed.
        objective: the objective that must become positive, as of `PDGD`.
    """

    smallest_norm: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True  # they decide what succeeds
    threat: Threat
    steps: int = 100
    step_size: float = 0.01
    binary_steps: int = 9
    initial_const: float = 0.01
    confidence: float = 0.0
    objective: Loss = expected_margin
    draws: int | None = None

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, binary_steps=self.binary_steps, draws=self.draws)
        # Below zero the attack would climb away from success, and the network seem robust.
        at_least(0, step_size=self.step_size, confidence=self.confidence)
        check_norm(self, 2)

    def cost(self, count: PassCount) -> int:
        return count.drawn(self.draws) * (1 + 2 * self.steps * self.binary_steps)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        evaluate = ObjectiveGradient(self.objective, self.draws)
        best = BestSoFar.begin(evaluate, defense, x, y, generator, self.confidence)
        const = best.value.new_full((len(x),), self.initial_const)
        low, high = torch.zeros_like(const), torch.full_like(const, torch.inf)
        index = (~best.succeeded).nonzero()[:, 0]
        bounds = self.threat.bounds
        middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
        for _ in range(self.binary_steps if len(index) else 0):
            # Only success with the current c decides on the next one.
            best.succeeded = torch.zeros_like(best.succeeded)
            w = ((x[index] - middle) / (STRETCH * half)).clamp(-1 / STRETCH, 1 / STRETCH).atanh()
            # Every c sees the same noise: the number of steps of the last depends on the batch.
            images = (index, x[index], y[index], rows_of(generator, index), const[index])
            zero, cost = torch.zeros_like(w), torch.zeros_like(const[index])
            state = (self._images(w), w, zero, zero.clone(), cost, torch.full_like(cost, torch.inf))
            self._descend(defense, BatchedAdam(*images, *state), best)
            low = torch.where(best.succeeded, low, const)
            high = torch.where(best.succeeded, const, high)
            # Tenfold until a c succeeds, then the middle of the interval.
            const = torch.where(high.isinf(), 10 * const, (low + high) / 2)
        return brought_inside(best.x_adv, x, self.threat)

    def _descend(self, defense: Defense, run: BatchedAdam, best: BestSoFar) -> None:
        """Take the Adam steps for one c, and record the images found in `best`."""
        evaluate = ObjectiveGradient(self.objective, self.draws)
        for count in range(1, self.steps + 1):
            run.w.requires_grad_()
            # Subtracted, tanh's rounding errors are no gradient that Adam would scale to a step.
            delta = self._images(run.w) - run.origin
            x_adv = run.x + delta
            x_adv = x_adv + (x_adv.clamp(*self.threat.bounds) - x_adv).detach()
            value = evaluate.value(defense, x_adv, run.y, run.generator).to(x_adv)
            if not value.requires_grad:
                raise NoGradientError()
            hooked(x_adv, run.generator)
            squared = delta.square().flatten(1).sum(1)
            cost = squared + run.const * (self.confidence - value).clamp_min(0)
            (gradient,) = torch.autograd.grad(cost.sum(), run.w)
            distance = squared.detach().sqrt()
            best.update(run.index, x_adv.detach(), distance, value.detach(), self.confidence)
            run.cost += cost.detach()
            step, _ = adam_step(gradient, run.mean, run.square, self.step_size, count)
            run.w = (run.w.detach() - step).clamp_(-LIMIT, LIMIT)
            if count % math.ceil(self.steps / 10) == 0:
                falling = run.cost < PROGRESS * run.previous_cost
                run.previous_cost, run.cost = run.cost, torch.zeros_like(run.cost)
                run = run.select(falling.nonzero()[:, 0])  # those whose cost still falls
                if not len(run):
                    break

    def _images(self, w: Tensor) -> Tensor:
        """Return the images [b, …] of variables w; within the bounds up to rounding."""
        low, high = self.threat.bounds
        middle, half = (low + high) / 2, (high - low) / 2
        return middle + STRETCH * half * w.tanh()
