"""How gradients become moves: the optimisers of `PGD(ascent=…)`.

Sign-SGD is PGD's default, AggMo without momentum. Momentum is AggMo with one damping, and momentum
boosting (MI-FGSM) that of its variant "normalized": `AggMo([0.9], "normalized")`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rob.threat import TINY, Threat, scale

Move = Callable[[Tensor], Tensor]
Variant = Literal["steepest", "gradients", "normalized", "paper"]


class Ascent(ABC):
    """An optimiser. Subclasses are frozen dataclasses."""

    @abstractmethod
    def begin(self, threat: Threat) -> Move:
        """A climb's own moves, each of the gradients so far, per image.

        Args:
            threat: whose norm gives steps their length.

        Returns:
            A function of the next gradients [B, …] that gives the move [B, …], in step sizes.
        """


def aggmo(count: int) -> tuple[float, ...]:
    """The momentum 0, 0.9, 0.99 … 1 - 10^-j of AggMo, so many of them.

    Raises:
        ValueError: count is below 1.
    """
    if count < 1:
        raise ValueError(f"AggMo needs at least one damping, got {count}")
    return tuple(1 - 10.0**-j for j in range(count))


@dataclass(frozen=True)
class AggMo(Ascent):
    """Aggregated momentum (Lucas et al. 2019; RT paper, Algorithm 1): several velocities at once.

    The variants, with the steepest direction of unit norm in the threat's norm:

    - "steepest": v <- damping v + steepest(gradient), the move is the mean of steepest(v): the RT
      authors' code with `normalize: True`;
    - "gradients": v <- damping v + gradient, each of its d entries clamped to +-1 / sqrt(d), the
      move is the mean of steepest(v): the RT authors' code with `normalize: False`, which most of
      their configurations have. Steps with a larger gradient count for more;
    - "normalized": v <- damping v + gradient / ||gradient||_1, the move is the mean of steepest(v):
      with one damping MI-FGSM (Dong et al. 2018, eqs. 6 and 7), the RT paper's momentum boosting;
    - "paper": v as in "steepest", the move is the mean of v, up to 1 / (1 - damping) steps long.

    The RT authors' code is for linf and takes signs; in other norms it is the steepest direction.

    Args:
        momentum: one for each velocity, in [0, 1]; `aggmo(B)` are those of the papers. With 1, the
            usual one of MI-FGSM, a velocity is the sum of all gradients so far.
        variant: what is accumulated, and where the direction is taken.

    Raises:
        ValueError: a damping outside [0, 1], or an unknown variant.
    """

    momentum: tuple[float, ...] = aggmo(6)
    variant: Variant = "steepest"

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", tuple(self.momentum))
        if not self.momentum or not all(0 <= d <= 1 for d in self.momentum):
            raise ValueError(f"momentum must be numbers in [0, 1], got {self.momentum}")
        if self.variant not in get_args(Variant):
            raise ValueError(f"variant must be of {get_args(Variant)}, got {self.variant!r}")

    def begin(self, threat: Threat) -> Move:
        """The moves of a climb."""
        pushes = {"gradients": _clamped, "normalized": _unit}
        push = pushes.get(self.variant, threat.steepest)
        turn = torch.clone if self.variant == "paper" else threat.steepest
        if not any(self.momentum) and push is not _clamped:
            return threat.steepest
        velocities = [torch.zeros(()) for _ in self.momentum]

        def move(gradient: Tensor) -> Tensor:
            g = push(gradient)
            for i, damping in enumerate(self.momentum):
                velocities[i] = damping * velocities[i].to(g) + g
            return torch.stack([turn(v) for v in velocities]).mean(0)

        return move


@dataclass(frozen=True)
class Nesterov(Ascent):
    """Momentum that looks ahead (Lin et al. 2020), in the form of `torch.optim.SGD`.

    v <- damping v + g with g = gradient / ||gradient||_1; the move is steepest(g + damping v).

    Args:
        damping: in [0, 1].

    Raises:
        ValueError: damping is not in [0, 1].
    """

    damping: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= 1:
            raise ValueError(f"damping must be in [0, 1], got {self.damping}")

    def begin(self, threat: Threat) -> Move:
        """The moves of a climb."""
        velocity = torch.zeros(())

        def move(gradient: Tensor) -> Tensor:
            nonlocal velocity
            g = _unit(gradient)
            velocity = self.damping * velocity.to(g) + g
            return threat.steepest(g + self.damping * velocity)

        return move


@dataclass(frozen=True)
class Adam(Ascent):
    """Adam (Kingma and Ba 2015), with its own moves: pixels whose gradient varies move less.

    A steepest direction taken of them would undo what tells it from momentum. They are divided by
    the norm of all ones, so that a step is about as long as others in any norm: for linf it is
    `torch.optim.Adam` with the step size as its rate and an eps of next to nothing.

    Args:
        betas: momentum of the gradients' mean and mean square, in [0, 1).

    Raises:
        ValueError: a beta is not in [0, 1).
    """

    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")

    def begin(self, threat: Threat) -> Move:
        """The moves of a climb."""
        first, second = self.betas
        mean, root, steps = torch.zeros(()), torch.zeros(()), 0

        def move(gradient: Tensor) -> Tensor:
            nonlocal mean, root, steps
            steps += 1
            mean = first * mean.to(gradient) + (1 - first) * gradient
            # the root of the mean square, without squares, which underflow on confident networks
            root = torch.hypot(second**0.5 * root.to(gradient), (1 - second) ** 0.5 * gradient)
            ratio = (1 - second**steps) ** 0.5 / (1 - first**steps)
            step = ratio * mean / root.clamp_min(torch.finfo(root.dtype).tiny)
            return scale(step, 1 / threat.size(torch.ones_like(step)))

        return move


def _clamped(gradient: Tensor) -> Tensor:
    """Each of an image's d entries clamped to +-1 / sqrt(d)."""
    most = gradient.shape[1:].numel() ** -0.5
    return gradient.clamp(-most, most)


def _unit(gradient: Tensor) -> Tensor:
    """Of 1-norm 1 for each image; 0 where it is 0."""
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(TINY)
    return (flat / flat.abs().sum(1, keepdim=True).clamp_min(TINY)).view_as(gradient)
