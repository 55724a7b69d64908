"""Optimizers of attacks, `PGD(ascent=…)`: they turn gradients into steps.

PGD's default is the steepest direction of each gradient, AggMo without momentum. Momentum is AggMo
with one velocity, and momentum boosting (MI-FGSM) its variant "normalized":
`AggMo([0.9], "normalized")`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rob.runtime.errors import within
from lightning_rob.threat import Threat, divisor, scale

State = tuple[Tensor, ...]
Variant = Literal["steepest", "gradients", "normalized", "paper"]


@dataclass
class StepRule:
    """The optimizer of one run, called with one gradient [B, …] after the other."""

    # Maps a gradient [B, …] and the state to the step in units of the step size and the next state.
    update: Callable[[Tensor, State], tuple[Tensor, State]]
    state: State = ()  # one row per image; scalars before the first gradient

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the step [B, …] that follows from this gradient [B, …] and those before it."""
        step, self.state = self.update(gradient, self.state)
        return step

    def select(self, rows: Tensor) -> "StepRule":
        """Return the rule of some of the images, given as a mask [B] or as indices."""
        return StepRule(self.update, tuple(v[rows] if v.dim() else v for v in self.state))


class AttackOptimizer(ABC):
    """How an attack turns gradients into steps. Subclasses are frozen dataclasses."""

    @abstractmethod
    def init(self, threat: Threat) -> StepRule:
        """Return the step rule of a new run; the threat's norm defines the length of a step."""


def aggmo(count: int) -> tuple[float, ...]:
    """Return the first `count` momentum coefficients of AggMo: 0, 0.9, 0.99 … 1 - 10^-j."""
    return tuple(1 - 10.0**-j for j in range(count))


@dataclass(frozen=True)
class AggMo(AttackOptimizer):
    """Aggregated momentum (Lucas et al. 2019; RT paper, Algorithm 1): several velocities at once.

    Steepest directions have unit length in the threat's norm; for l1 they are `Threat.direction`.
    Each velocity v has a coefficient m:

    - "steepest": v <- m v + steepest(gradient); the step is the mean of steepest(v). The RT
      authors' code with `normalize: True`.
    - "gradients": v <- m v + gradient, each of its d entries clamped to +-1 / sqrt(d); the step is
      the mean of steepest(v). The RT authors' code with `normalize: False`, as in most of their
      configurations. Iterations with a larger gradient weigh more.
    - "normalized": v <- m v + gradient / ||gradient||_1; the step is the mean of steepest(v). With
      one coefficient it is MI-FGSM (Dong et al. 2018, eqs. 6 and 7), the RT paper's momentum
      boosting.
    - "paper": v as in "steepest"; the step is the mean of v, up to 1 / (1 - m) step sizes long.

    Args:
        momentum: one coefficient in [0, 1] for each velocity; `aggmo(B)` returns those of the
            papers. With 1, usual in MI-FGSM, a velocity is the sum of all gradients so far.
    """

    momentum: tuple[float, ...] = aggmo(6)
    variant: Variant = "steepest"

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", tuple(self.momentum))
        for coefficient in self.momentum:
            within(0, 1, momentum=coefficient)
        if self.variant not in get_args(Variant):
            raise ValueError(f"variant must be of {get_args(Variant)}, got {self.variant!r}")

    def init(self, threat: Threat) -> StepRule:
        def clamped(gradient: Tensor) -> Tensor:
            bound = gradient.shape[1:].numel() ** -0.5
            return gradient.clamp(-bound, bound)

        own = {"gradients": clamped, "normalized": _unit}
        accumulated = own.get(self.variant, threat.direction)
        direction = torch.clone if self.variant == "paper" else threat.direction
        if not any(self.momentum) and self.variant != "gradients":
            # Every velocity is the current gradient, scaled: no state, and half of the work.
            return StepRule(lambda gradient, state: (threat.direction(gradient), state))

        def update(gradient: Tensor, velocities: State) -> tuple[Tensor, State]:
            g = accumulated(gradient)
            pairs = zip(self.momentum, velocities, strict=True)
            velocities = tuple(m * velocity.to(g) + g for m, velocity in pairs)
            return torch.stack([direction(v) for v in velocities]).mean(0), velocities

        return StepRule(update, (torch.zeros(()),) * len(self.momentum))


@dataclass(frozen=True)
class Nesterov(AttackOptimizer):
    """Nesterov's accelerated gradient (Lin et al. 2020), in the form of `torch.optim.SGD`.

    v <- m v + g with g = gradient / ||gradient||_1 and m in [0, 1]; the step is steepest(g + m v).
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        within(0, 1, momentum=self.momentum)

    def init(self, threat: Threat) -> StepRule:
        def update(gradient: Tensor, state: State) -> tuple[Tensor, State]:
            g = _unit(gradient)
            velocity = self.momentum * state[0].to(g) + g
            return threat.direction(g + self.momentum * velocity), (velocity,)

        return StepRule(update, (torch.zeros(()),))


@dataclass(frozen=True)
class Adam(AttackOptimizer):
    """Adam (Kingma and Ba 2015) with its own steps: pixels whose gradient varies move less.

    The steps are not turned into steepest directions, which would undo the difference from
    momentum. They are divided by the norm of the all-ones image, which makes them about as long as
    those of the other optimizers in any norm: for linf this is `torch.optim.Adam` with the step
    size as learning rate and an eps near 0.

    Args:
        betas: decay of the gradients' running mean and mean square, in [0, 1).
    """

    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            within(0, 1, betas=beta)

    def init(self, threat: Threat) -> StepRule:
        first, second = self.betas
        steps = count(1)

        def update(gradient: Tensor, state: State) -> tuple[Tensor, State]:
            mean, root = (moment.to(gradient) for moment in state)
            mean = first * mean + (1 - first) * gradient
            # the root of the mean square, without squares, which underflow on confident networks
            root = torch.hypot(second**0.5 * root, (1 - second) ** 0.5 * gradient)
            t = next(steps)
            bias = (1 - second**t) ** 0.5 / (1 - first**t)
            step = bias * mean / root.clamp_min(torch.finfo(root.dtype).tiny)
            return scale(step, 1 / threat.size(torch.ones_like(step))), (mean, root)

        return StepRule(update, (torch.zeros(()), torch.zeros(())))


def _unit(gradient: Tensor) -> Tensor:
    """Scale each image's gradient to 1-norm 1; zero stays zero."""
    flat = gradient.flatten(1)
    # Scaled first: the gradients of a confident network would underflow in the sum.
    flat = flat / divisor(flat.abs().amax(1, keepdim=True))
    return (flat / divisor(flat.abs().sum(1, keepdim=True))).view_as(gradient)
