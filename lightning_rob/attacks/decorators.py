"""Attacks that wrap another attack, and a corruption in the place of an attack."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from lightning_rob.attacks.active_set import positions, rows_of
from lightning_rob.attacks.backward import Backward, entered, other_forward
from lightning_rob.attacks.base import Attack, is_batch_separable
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.execution import run_in_chunks
from lightning_rob.attacks.nested import walk
from lightning_rob.attacks.residual import Forward
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.precision import in_float32
from lightning_rob.threat import Threat, choose, scale

HALVINGS = 12
AWAY_FROM_IMAGE = 0.499 / 255  # turns rounding to the nearest into rounding away from the image

Precision = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class AttackDecorator(Attack):
    """Base class of attacks that wrap another attack and inherit its threat model."""

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return self.attack.threat

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        return [(p, replace(self, attack=part)) for p, part in self.attack.strategies(defense)]


@dataclass(frozen=True)
class WithBackward(AttackDecorator):
    """Run any attack with the gradients of one `Backward` or several, as `PGD(backward=…)` does."""

    backward: Backward | Sequence[Backward]

    def __post_init__(self) -> None:
        if isinstance(self.backward, Sequence):
            object.__setattr__(self, "backward", tuple(self.backward))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        with entered(self.backward, defense):
            return self.attack.perturb(defense, x, y, generator)


@dataclass(frozen=True)
class Budgeted(AttackDecorator):
    """Give an attack the most steps that fit into a number of passes.

    A pass is one forward or one backward pass of one image through one network: a step of PGD costs
    two, on an ensemble of M members 2 M, on n draws of a random defense 2 n. No image costs more;
    images that leave early cost fewer. The attack's own number of steps (`queries` of Square) is
    not used; all its other arguments hold. PGD with n steps cannot cross the ball if n times its
    step size is below 2 eps: take APGD, which chooses its own. MinimalNorm divides the passes
    equally among its radii; AutoAttack and Strongest keep the proportions of their attacks. Where
    the number of classes decides, one image is predicted first, within the budget.

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
    """Attack a few images at a time: the same images up to rounding, in less memory.

    Raises:
        ValueError: an attack whose results depend on the whole batch.
        TypeError: when called on a defense whose predictions depend on the whole batch.
    """

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

    Compiling costs tens of seconds for each network and image size. Gradients in half precision or
    TF32 are not exact, and **the attack may be weaker**: compare (docs/performance.md). Under
    `autocast` every forward pass without gradients keeps full precision; under `tf32` none does.
    The evaluation itself always runs in full precision.

    Args:
        compile: run networks by `torch.compile`; "reduce-overhead" also records CUDA graphs, which
            spare the launches of kernels where networks or batches are small, and keep memory for
            each network and shape.
        autocast: precision of the networks' gradients; None leaves it.
        tf32: let NVIDIA GPUs round the inputs of float32 convolutions and matrix products to 10
            bits of mantissa, which attacks otherwise forbid. Changes nothing on a CPU.

    Raises:
        TypeError: when called, with compile or autocast, on a defense that names no networks.
    """

    compile: bool | Literal["reduce-overhead"] = False
    autocast: Precision | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        inner = list(walk(self.attack))
        if any(isinstance(part, Accelerated) for part in inner):
            raise ValueError("accelerated twice: give compile, autocast and tf32 to one of them")
        rounded = self.autocast or self.tf32
        if rounded and any(part.stops_on_gradient_logits for part in inner):
            raise ValueError(
                f"leave out early_stop or {'autocast' if self.autocast else 'tf32'}: rounded "
                "logits would decide which images are fooled"
            )
        if not self.compile and not rounded:
            raise ValueError("nothing to accelerate by: give compile=True, autocast or tf32=True")
        if self.autocast is not None and self.autocast not in get_args(Precision):
            raise ValueError(f"autocast must be of {get_args(Precision)}, got {self.autocast!r}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        if self.compile == "reduce-overhead" and x.device.type != "cuda":
            raise ValueError(
                f"reduce-overhead is for NVIDIA GPUs, got images on {x.device}: give compile: true"
            )
        nets = defense.foldable_networks if self.compile or self.autocast else []
        # ARC, FAB and DeepFool differentiate one forward pass several times.
        kept = functorch_config.patch(donated_buffer=False) if self.compile else nullcontext()
        with kept, other_forward(nets, self._accelerate), in_float32(self.tf32 or None):
            return self.attack.perturb(defense, x, y, generator)

    def _accelerate(self, forward: Forward) -> Forward:
        mode = self.compile if isinstance(self.compile, str) else None
        fast: Forward = torch.compile(forward, mode=mode) if self.compile else forward
        dtype = getattr(torch, self.autocast) if self.autocast else None

        def accelerated(x: Tensor) -> Tensor:
            rounded = dtype and torch.is_grad_enabled() and x.requires_grad
            with torch.autocast(x.device.type, dtype) if rounded else nullcontext():
                logits = fast(x)
            # The next call of a CUDA graph writes into the logits of the last one.
            return logits.clone() if mode else logits

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
