"""An attack on networks that run faster, compiled or in a lower precision."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rob.attacks.around import AttackDecorator
from lightning_rob.attacks.base import Forward, other_forward, walk
from lightning_rob.attacks.pgd import PGD
from lightning_rob.defenses import Defense
from lightning_rob.precision import in_float32
from lightning_rob.randomness import Generator

Precision = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Accelerated(AttackDecorator):
    """Another attack, by networks that are compiled, or whose gradients are in a lower precision.

    Compiling costs tens of seconds for each network and size of image, and may cost more than it
    saves. Gradients in half precision or TF32 are not exact, so that **the attack may be weaker**:
    compare (docs/performance.md). Under `autocast` all that the attack decides without gradients
    stays in full precision; under `tf32` nothing in it does. The evaluation always stays in it.

    Args:
        attack: the attack.
        compile: run networks by `torch.compile`.
        autocast: the precision of the networks' gradients; None leaves it.
        tf32: let NVIDIA GPUs round the inputs of float32 convolutions and matrix products to 10
            bits of mantissa, which attacks otherwise forbid. Changes nothing on a CPU.

    Raises:
        ValueError: none is wanted, another precision, one within another, or autocast or tf32 of a
            PGD with `early_stop`.
        TypeError: when called, with compile or autocast, on a defense that names no networks.
    """

    compile: bool = False
    autocast: Precision | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        inner = list(walk(self.attack))
        if any(isinstance(part, Accelerated) for part in inner):
            raise ValueError("accelerated twice: give compile, autocast and tf32 to one of them")
        rounded = self.autocast or self.tf32
        if rounded and any(isinstance(part, PGD) and part.early_stop for part in inner):
            raise ValueError(
                f"leave out early_stop or {'autocast' if self.autocast else 'tf32'}: who is "
                "fooled would be told by rounded logits"
            )
        if not self.compile and not rounded:
            raise ValueError("nothing to accelerate by: give compile=True, autocast or tf32=True")
        if self.autocast is not None and self.autocast not in get_args(Precision):
            raise ValueError(f"autocast must be of {get_args(Precision)}, got {self.autocast!r}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        nets = defense.foldable_networks if self.compile or self.autocast else []
        with other_forward(nets, self._forward), in_float32(self.tf32 or None):
            return self.attack.perturb(defense, x, y, generator)

    def _forward(self, plain: Forward) -> Forward:
        quick: Forward = torch.compile(plain) if self.compile else plain

        def forward(x: Tensor) -> Tensor:
            if self.autocast is None or not (torch.is_grad_enabled() and x.requires_grad):
                return quick(x)
            with torch.autocast(x.device.type, getattr(torch, self.autocast)):
                return quick(x).to(x)

        return forward
