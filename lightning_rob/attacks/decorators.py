"""Attacks that wrap another attack, and a corruption in the place of an attack."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from lightning_rob.attacks.active_set import derived, positions, rows_of
from lightning_rob.attacks.backward import (
    Backward,
    Forward,
    entered,
    other_forward,
    passes_of,
)
from lightning_rob.attacks.base import Attack, is_batch_separable
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.execution import run_in_chunks
from lightning_rob.attacks.nested import walk
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, choose, scale
from lightning_rob.transforms import Transform

HALVINGS = 12
AWAY_FROM_IMAGE = 0.499 / 255  # turns rounding to the nearest into rounding away from the image


@dataclass(frozen=True)
class AttackDecorator(Attack):
    """Base class of attacks that wrap another attack and inherit its threat model."""

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return self.attack.threat

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        return [(p, replace(self, attack=part)) for p, part in self.attack.strategies(defense)]

    def turns(self, images: int) -> Iterator[tuple[Tensor, int, Attack]]:
        for order, attacked, part in self.attack.turns(images):
            yield order, attacked, replace(self, attack=part)

    def aimed_at(self, y: Tensor) -> Tensor:
        return self.attack.aimed_at(y)


@dataclass(frozen=True)
class WithBackward(AttackDecorator):
    """Run any attack with the gradients of one `Backward` or several, as `PGD(backward=…)` does."""

    backward: Backward | Sequence[Backward]

    def __post_init__(self) -> None:
        if isinstance(self.backward, Sequence):
            object.__setattr__(self, "backward", tuple(self.backward))

    def cost(self, count: PassCount) -> int:
        passes = self.attack.cost(count)  # at most half of them are gradients
        return passes + -(-passes // 2) * passes_of(self.backward)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        with entered(self.backward, defense):
            return self.attack.perturb(defense, x, y, generator)


@dataclass(frozen=True)
class Budgeted(AttackDecorator):
    """Give an attack the most steps that fit into a number of passes.

    A pass is one forward or one backward pass of one image through one network: a step of PGD costs
    two, on an ensemble of M members 2 M, on n draws of a random defense 2 n. No image costs more;
    images that leave early cost fewer. The attack's own number of steps (`queries` of Square,
    `radii` of MinimalNorm) is not used; all its other arguments hold. PGD with n steps cannot cross
    the ball if n times its step size is below 2 eps: take APGD, which chooses its own; in l1 it
    takes many short runs, in place of its restarts. AutoAttack and Strongest keep the proportions
    of their attacks. Where the number of classes decides, one image is predicted first, within the
    budget.

    Args:
        attack: one whose passes are known before it runs: not TAA, PAA, GMSA or ThroughAdaptation,
            inside of which it may be put.
        passes: the largest number of forward and backward passes an image, together.
    """

    passes: int

    def __post_init__(self) -> None:
        at_least(1, passes=self.passes)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        attack = self.attack.within(self.passes, PassCount(defense, x))
        return attack.perturb(defense, x, y, generator)


@dataclass(frozen=True)
class Chunked(AttackDecorator):
    """Attack a few images at a time: the same images up to rounding, in less memory."""

    splits_batches: ClassVar[bool] = True
    images: int

    def __post_init__(self) -> None:
        at_least(1, images=self.images)
        if whole := [type(part).__name__ for part in walk(self.attack) if part.batch_dependent]:
            raise ValueError(
                f"{whole[0]} attacks whole batches and cannot be chunked: put Chunked around an "
                "attack inside it, if it has one"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if not is_batch_separable(self.attack, defense):
            kind = type(defense).__name__
            raise TypeError(f"{kind} adapts to whole batches: an attack on it cannot be chunked")
        return run_in_chunks(self.attack, self.images, defense, x, y, generator)


@dataclass(frozen=True)
class Accelerated(AttackDecorator):
    """Run an attack on compiled networks, or with gradients in a lower precision.

    Compiling costs tens of seconds for each network and image size. Gradients in half precision
    are not exact, and **the attack may be weaker**: compare (docs/performance.md). Every forward
    pass without gradients keeps full precision.

    Args:
        compile: run networks by `torch.compile`.
        autocast: precision of the networks' gradients; None leaves it.
    """

    compile: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        if self.autocast and any(part.stops_on_gradient_logits for part in walk(self.attack)):
            raise ValueError(
                "leave out early_stop or autocast: rounded logits would decide which images are "
                "fooled"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        # ARC, FAB and DeepFool differentiate one forward pass several times.
        kept = functorch_config.patch(donated_buffer=False) if self.compile else nullcontext()
        with kept, other_forward(defense.foldable_networks, self._accelerate):
            return self.attack.perturb(defense, x, y, generator)

    def _accelerate(self, forward: Forward) -> Forward:
        fast: Forward = torch.compile(forward) if self.compile else forward
        dtype = getattr(torch, self.autocast) if self.autocast else None

        def accelerated(x: Tensor) -> Tensor:
            rounded = dtype and torch.is_grad_enabled() and x.requires_grad
            with torch.autocast(x.device.type, dtype) if rounded else nullcontext():
                return fast(x)

        return accelerated


@dataclass(frozen=True)
class Quantized8Bit(AttackDecorator):
    """Round an attack's images to 8 bits without leaving its threat model.

    Truncation, as by `uint8`, leaves a ball of radius 8/255 by another 1/255; rounding to the
    nearest may leave an l2 ball. Here each image is rounded to the nearest. Where that lies outside
    the ball, bisection shrinks the perturbation until the rounded image lies inside.

    The images that it perturbs should be 8-bit images themselves.
    """

    def __post_init__(self) -> None:
        if self.threat.bounds != (0.0, 1.0):
            raise ValueError(f"8-bit images range over (0, 1), got bounds {self.threat.bounds}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        x_adv = self.attack(defense, x, y, generator)
        nearest = quantize(x_adv, x, self.threat)
        if defense.transductive:  # its predictions on a part of the round mean nothing
            return nearest
        # Rounding to the nearest may undo an attack that goes no further than it must.
        outward = x_adv + (x_adv - x).sign() * AWAY_FROM_IMAGE
        farther = quantize(outward, x, self.threat)
        with torch.no_grad():  # with copies of the streams: both predictions draw the same noise
            right_nearest, right_farther = (
                defense(images, rows_of(generator, positions(x))).gather(1, y[:, None])[:, 0]
                for images in (nearest, farther)
            )
        return choose(right_farther < right_nearest, farther, nearest)


def quantize(x_adv: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """Round images [B, …] to multiples of 1/255 within the threat around x [B, …]."""
    # A perturbation of exactly eps may measure a rounding error more.
    allowed = threat.eps * (1 + 1e-5)
    nearest = _round_to_8_bits(x_adv)
    outside = threat.distance(nearest, x) > allowed
    if not bool(outside.any()):
        return nearest
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    best = _round_to_8_bits(x)  # where x is no 8-bit image, the search may find no point at all
    for _ in range(HALVINGS):
        share = (low + high) / 2
        candidate = _round_to_8_bits(x + scale(x_adv - x, share))
        inside = threat.distance(candidate, x) <= allowed
        best = choose(inside, candidate, best)
        low, high = torch.where(inside, share, low), torch.where(inside, high, share)
    return choose(outside, best, nearest)


def _round_to_8_bits(x: Tensor) -> Tensor:
    return (x * 255).round().clamp(0, 255) / 255


@dataclass(frozen=True)
class NoAttack(Attack):
    """Return the images unchanged."""

    ignores_state: ClassVar[bool] = True
    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return x


@dataclass(frozen=True)
class CommonCorruption(Attack):
    """Corrupt images by a random transform that does not depend on the defense.

    Args:
        attack: an attack on the corrupted images, around which its ball is; None corrupts alone.
    """

    knowledge: ClassVar[str] = "nothing: images are corrupted whatever the defense"
    transform: Transform
    attack: Attack | None = None

    def __post_init__(self) -> None:
        if self.attack:
            object.__setattr__(self, "knowledge", f"{self.knowledge}; then {self.attack.knowledge}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """All images."""
        return Threat("linf", 1.0)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        corrupted = self.transform(x, *self.transform.sample(x, generator))
        if self.attack is None:
            return corrupted
        return self.attack.perturb(defense, corrupted, y, derived(generator, 0))


@dataclass(frozen=True)
class DoublePrecision(AttackDecorator):
    """An attack that computes in double precision, on a copy of the defense."""

    strategies = Attack.strategies  # the attack sees the copy

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        found = self.attack(doubled(defense), x.double(), y, generator)
        return self.threat.project(found.to(x.dtype), x)


@torch.no_grad()  # with gradients, the copied weights of TorchScript would be no leaves
def doubled(defense: Defense) -> Defense:
    """Return a copy of the defense in double precision."""
    return copy.deepcopy(defense).double()
