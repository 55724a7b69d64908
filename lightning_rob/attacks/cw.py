"""The attack of Carlini and Wagner: the smallest l2 perturbation that fools."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack, height
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Objective, expected_margin
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat

# tanh spans twice the bounds, within which w is kept: on a tanh of just the bounds, pixels that
# are black or white have hardly a slope to leave by, and 100 steps of 0.01 miss four digits in ten.
STRETCH = 2.0
LIMIT = math.atanh(1 / STRETCH)
PROGRESS = 0.9999  # what a tenth of the steps must leave of the cost, as in the authors' code


@dataclass
class Best:
    """Of each image the smallest perturbation that succeeds, else the one nearest to success.

    Args:
        x_adv: [B, …] the perturbed images.
        size: [B] their distances; infinite where none succeeds.
        height: [B] their objectives.
        won: [B] whether there was a success since this was last set.
    """

    x_adv: Tensor
    size: Tensor
    height: Tensor
    won: Tensor

    def keep(self, live: Tensor, x_adv: Tensor, size: Tensor, height: Tensor, above: float) -> None:
        """Take over what is better, of the images with these indices."""
        success = height > above
        smaller = success & (size < self.size[live])
        nearer = ~success & self.size[live].isinf() & (height > self.height[live])
        rows = (smaller | nearer).nonzero()[:, 0]
        wins = live[rows]
        self.x_adv[wins], self.height[wins] = x_adv[rows], height[rows]
        self.size[wins] = size.masked_fill(~success, torch.inf)[rows]
        self.won[live] |= success


@dataclass
class Descent:
    """Adam (Kingma and Ba 2015) on the images whose cost still falls; one row of each per image.

    Args:
        live: [B] their indices.
        x: [B, …] the images.
        y: [B] their labels.
        const: [B] their c.
        generator: their noise.
        origin: [B, …] the images as the tanh of their w, rounded as it rounds them.
        w: [B, …] what Adam moves.
        mean: [B, …] of the gradients.
        square: [B, …] mean of the gradients' squares.
        cost: [B] the sum of costs since the last check.
        before: [B] the sum of costs up to the last check.
    """

    live: Tensor
    x: Tensor
    y: Tensor
    const: Tensor
    generator: Generator
    origin: Tensor
    w: Tensor
    mean: Tensor
    square: Tensor
    cost: Tensor
    before: Tensor

    def step(self, gradient: Tensor, step_size: float, count: int) -> None:
        """Move against the gradient, no further than the bounds."""
        self.mean.lerp_(gradient, 0.1)
        self.square.lerp_(gradient.square(), 0.001)
        slope = (self.square / (1 - 0.999**count)).sqrt_().add_(1e-8)
        step = (self.mean / slope).mul_(step_size / (1 - 0.9**count))
        self.w = (self.w.detach() - step).clamp_(-LIMIT, LIMIT)

    def drop_settled(self) -> None:
        """Go on without the images whose cost has not fallen since the last check."""
        rows = (self.cost < PROGRESS * self.before).nonzero()[:, 0]
        self.before, self.cost = self.cost, torch.zeros_like(self.cost)
        if len(rows) == len(self.live):
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor | Streams):
                setattr(self, field.name, value[rows])


def brought_inside(x_adv: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """Images outside the ball projected onto it, the others not even rounded: [B, …]."""
    inside = (threat.distance(x_adv, x) <= threat.eps).view(-1, *[1] * (x.dim() - 1))
    return torch.where(inside, x_adv.clamp(*threat.bounds), threat.project(x_adv, x))


@dataclass(frozen=True)
class CW(Attack):
    """Smallest l2 perturbation by descent on ||delta||^2 + c h (Carlini and Wagner 2017).

    h is how much the objective falls short of `confidence`, c is searched for each image, and
    pixels are a tanh of what Adam moves. The smallest perturbation found is brought into the ball:
    a huge eps leaves it as it is. Images that the objective counts as fooled stay as they are.
    On an ensemble success is that of the mean: with confidence 0 some members stay right.

    Args:
        threat: the ball and the bounds; l2.
        steps: Adam steps for one c; fewer for images whose cost stops falling.
        step_size: of Adam, on the scale of tanh's argument; from 0.1 on too coarse for most images.
        binary_steps: values of c tried; too small ones grow tenfold, then the range is halved.
        initial_const: the first c.
        confidence: what the objective must exceed to succeed.
        objective: what is to become positive; `expected_margin` or `linear` (the margin of the
            mean logits), which are one on a single network.
        draws: how often a random defense is drawn per step; None draws once.

    Raises:
        ValueError: a count below 1, a step size or c that is not positive, a negative confidence,
            another norm.
    """

    threat: Threat
    steps: int = 100
    step_size: float = 0.01
    binary_steps: int = 9
    initial_const: float = 0.01
    confidence: float = 0.0
    objective: Objective = expected_margin
    draws: int | None = None

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "binary_steps": self.binary_steps, "draws": self.draws}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        for name in ("step_size", "initial_const"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.confidence >= 0:
            raise ValueError(f"confidence must not be negative, got {self.confidence}")
        if self.threat.p != 2:
            raise ValueError(f"CW is for l2, not for norm {self.threat.norm}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        with torch.no_grad():
            top = self._height(defense, x, y, generator, check=True)
        done = top > self.confidence
        const, low = torch.full_like(top, self.initial_const), torch.zeros_like(top)
        high = torch.full_like(top, torch.inf)
        best = Best(x.clone(), high.masked_fill(done, 0), top, done)
        live = (~done).nonzero()[:, 0]
        for _ in range(self.binary_steps if len(live) else 0):
            best.won = torch.zeros_like(done)
            self._descend(defense, self._start(x, y, const, live, generator), best)
            low, high = torch.where(best.won, low, const), torch.where(best.won, const, high)
            const = torch.where(high.isinf(), 10 * const, (low + high) / 2)
        return brought_inside(best.x_adv, x, self.threat)

    def _start(
        self, x: Tensor, y: Tensor, const: Tensor, live: Tensor, generator: Generator
    ) -> Descent:
        # Every c meets the same noise: how many steps the last one took depends on the batch.
        part = generator[live] if isinstance(generator, Streams) else generator
        middle, half = self._range()
        w = ((x[live] - middle) / (STRETCH * half)).clamp(-1 / STRETCH, 1 / STRETCH).atanh()
        none = torch.zeros_like(const[live])
        zero, start = torch.zeros_like(w), torch.full_like(none, torch.inf)
        return Descent(
            live,
            x[live],
            y[live],
            const[live],
            part,
            self._images(w),
            w,
            zero,
            zero.clone(),
            none,
            start,
        )

    def _descend(self, defense: Defense, run: Descent, best: Best) -> None:
        for count in range(1, self.steps + 1):
            run.w.requires_grad_()
            # Adam would make a step of the rounding of tanh, where nothing else has a gradient.
            delta = self._images(run.w) - run.origin
            x_adv = run.x + delta
            x_adv = x_adv + (x_adv.clamp(*self.threat.bounds) - x_adv).detach()
            found = self._height(defense, x_adv, run.y, run.generator)
            squared = delta.square().flatten(1).sum(1)
            cost = squared + run.const * (self.confidence - found).clamp_min(0)
            (gradient,) = torch.autograd.grad(cost.sum(), run.w)
            size = squared.detach().sqrt()
            best.keep(run.live, x_adv.detach(), size, found.detach(), self.confidence)
            run.cost += cost.detach()
            run.step(gradient, self.step_size, count)
            if count % math.ceil(self.steps / 10) == 0:
                run.drop_settled()
                if not len(run.live):
                    break

    def _range(self) -> tuple[float, float]:
        low, high = self.threat.bounds
        return (low + high) / 2, (high - low) / 2

    def _images(self, w: Tensor) -> Tensor:
        """Within the bounds, but for rounding."""
        middle, half = self._range()
        return middle + STRETCH * half * w.tanh()

    def _height(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool = False
    ) -> Tensor:
        return height(self.objective, self.draws, defense, x, y, generator, check).to(x)
