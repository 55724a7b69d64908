"""Primal-dual gradient descent: the smallest perturbation, weighed against misclassification."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.cw import BestSoFar, adam_step, brought_inside
from lightning_rob.attacks.gradient import ObjectiveAt, ObjectiveGradient
from lightning_rob.attacks.pgd import is_certain
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Loss, expected_margin
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, ThreatPerImage, choose, divisor, per_image, scale

LAST_STEP = 0.01  # the last step size, as a share of the first
DUAL_STEP, LAST_DUAL_STEP = 0.1, 0.01  # of the logarithm of the ratio of weights
FIRST_RATIO, LARGEST_RATIO = math.log(1e2), math.log(1e6)  # of the weights, constraint to distance
AVERAGE = 0.9  # share of the running mean of the weights that stays
HALVINGS = 8  # of the distance, at the end
PROXIMAL_STEPS, PROXIMAL_CHANGE = 5, 0.01  # at most, and the relative change that ends them


@dataclass(frozen=True)
class PDGD(Attack):
    """Smallest perturbation by primal-dual gradient descent (Matyasko and Chau 2021).

    Minimises w0 ||delta||_p + w1 softplus(-m), where m is the objective, by Adam with falling step
    sizes; all iterates are within the bounds. The weights, w0 + w1 = 1, are those of a player who
    moves log(w1 / w0) up while the image is classified correctly and down while it is not. For l2
    the gradient includes that of the norm (PDGD); for linf each step of Adam on softplus(-m) is
    followed by the proximal operator of w0 / w1 ||delta||_inf in Adam's metric (PDPGD).

    At the end the smallest perturbation found is moved back towards the boundary by a bisection of
    eight forward passes, which the papers do not do, and projected into the ball: with a huge eps
    it is returned unchanged, as are images that the objective counts as fooled. On an ensemble the
    mean must succeed: some members stay correct. On very large logits the norm counts for little:
    use DDN there.

    Args:
        threat: the ball and the bounds; linf or l2.
        steps: number of steps, each of one forward and one backward pass.
        step_size: step size of Adam, as a share of the range of the bounds: the length of the first
            step at each pixel.
        objective: the objective that must become positive: `expected_margin`, or `linear` (the
            margin of the mean logits); they are equal on a single network.
    """

    smallest_norm: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True  # they decide which iterates count
    threat: Threat
    steps: int = 500
    step_size: float = 0.1
    objective: Loss = expected_margin

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)
        check_norm(self, math.inf, 2)

    def cost(self, count: PassCount) -> int:
        return count.networks * (1 + 2 * self.steps + HALVINGS)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if not is_certain(defense, self.objective):
            raise TypeError(f"PDGD is for fixed classifiers, not for {type(defense).__name__}")
        evaluate = ObjectiveGradient(self.objective)
        best = BestSoFar.begin(evaluate, defense, x, y, generator)
        low, high = self.threat.bounds
        step_size = (high - low) * self.step_size
        ratio, zero = x.new_full((len(x),), FIRST_RATIO), torch.zeros_like(x)
        players = (x, zero, zero.clone(), ratio, (-ratio).sigmoid())
        run = Descent(positions(x), x, y, derived(generator, 0), *players)
        run = run.select((~best.succeeded).nonzero()[:, 0])
        for step in range(self.steps if len(run) else 0):
            at = evaluate(defense, run.x_adv, run.y, run.generator, check=step == 0)
            value = at.value.to(x)
            best.update(run.index, run.x_adv, self.threat.size(run.x_adv - run.x), value, 0)
            run.descend(at, self.threat, step_size * LAST_STEP ** (step / self.steps))
            # The dual player starts with long steps, which find the right order of magnitude.
            left = 1 - step / max(self.steps - 1, 1)
            dual_step = LAST_DUAL_STEP + (DUAL_STEP - LAST_DUAL_STEP) * left
            moved = run.log_ratio - dual_step * value.sign()
            run.log_ratio = moved.clamp(-LARGEST_RATIO, LARGEST_RATIO)
            run.w0 = AVERAGE * run.w0 + (1 - AVERAGE) * (-run.log_ratio).sigmoid()
        shorten(defense, run, best, self.threat, self.objective)
        return brought_inside(best.x_adv, x, self.threat)


@torch.no_grad()
def shorten(
    defense: Defense, run: ActiveBatch, best: BestSoFar, threat: Threat, objective: Loss
) -> None:
    """Move the best images back towards the boundary, which the last iterates jump over."""
    run = run.select(best.distance[run.index].isfinite())
    high, farthest = best.distance[run.index], best.x_adv[run.index]
    low = torch.zeros_like(high)
    for _ in range(HALVINGS if len(run) else 0):
        radius = (low + high) / 2
        ball = ThreatPerImage(threat.norm, 1.0, threat.bounds, radii=radius)
        x_adv = ball.project(farthest, run.x)
        value = ObjectiveGradient(objective).value(defense, x_adv, run.y, run.generator).to(x_adv)
        best.update(run.index, x_adv, threat.size(x_adv - run.x), value, 0)
        low, high = torch.where(value > 0, low, radius), torch.where(value > 0, radius, high)


@dataclass
class Descent(ActiveBatch):
    """The state of the two players."""

    x_adv: Tensor  # [b, C, H, W] the iterates
    mean: Tensor  # [b, C, H, W] Adam's running mean of the gradients
    square: Tensor  # [b, C, H, W] Adam's running mean of the gradients' squares
    log_ratio: Tensor  # [b] log(w1 / w0) as last chosen
    w0: Tensor  # [b] the running mean of the weight of the distance
    count: int = 0  # number of steps taken

    def descend(self, at: ObjectiveAt, threat: Threat, step_size: float) -> None:
        """Move the images by one step of Adam and, for linf, by the proximal operator."""
        self.count += 1
        delta, slope = self.x_adv - self.x, (-at.value.to(self.x)).sigmoid()
        # The derivative of softplus(-m) by m is -sigmoid(-m).
        gradient = scale(at.gradient, -slope)
        if threat.p == 2:
            outward = scale(delta, self.w0 / divisor(threat.size(delta)))
            gradient = scale(gradient, 1 - self.w0) + outward
        step, root = adam_step(gradient, self.mean, self.square, step_size, self.count)
        self.x_adv = (self.x_adv - step).clamp(*threat.bounds)
        if threat.p == 2:
            return
        # The proximal operator in the metric of Adam's root: it minimises
        # w0 / w1 ||delta||_inf + |delta - target|^2 / 2, weighted by root / step size, by proximal
        # gradient steps (Melchior et al. 2019).
        largest, target = root.flatten(1).amax(1), self.x_adv - self.x
        weight, metric = self.w0 / (1 - self.w0) * step_size / largest, scale(root, 1 / largest)
        delta, moving = target, torch.ones_like(weight, dtype=torch.bool)
        for _ in range(PROXIMAL_STEPS):
            shrunk = shrink_largest(delta - metric * (delta - target), weight)
            shrunk = choose(moving, threat.confine(shrunk, self.x), delta)
            change = (shrunk - delta).flatten(1).norm(dim=1)
            delta, moving = shrunk, change > PROXIMAL_CHANGE * shrunk.flatten(1).norm(dim=1)
        self.x_adv = threat.apply(delta, self.x)


def shrink_largest(delta: Tensor, weight: Tensor) -> Tensor:
    """Compute the proximal operator of weight ||delta||_inf: [B, …], [B] -> [B, …]."""
    falling = delta.flatten(1).abs().sort(dim=1, descending=True).values
    counts = torch.arange(1, falling.shape[1] + 1, device=delta.device)
    # All entries are cut off at the level t with sum(max(|delta| - t, 0)) = weight, or at 0: the
    # largest of (the sum of the k largest entries - weight) / k over all k.
    level = ((falling.cumsum(1) - weight[:, None]) / counts).amax(1).clamp_min(0)
    reach = per_image(level, delta)
    return torch.maximum(torch.minimum(delta, reach), -reach)
