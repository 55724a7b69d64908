"""An attack on networks that run faster, compiled or in half precision."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_rob.attacks.around import Around
from lightning_rob.attacks.base import Forward, other_forward
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.rebuild import parts
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator

Precision = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Accelerated(Around):
    """Another attack, by networks that are compiled, or whose gradients are in half precision.

    Compiling costs tens of seconds for each network and size of image, and may cost more than it
    saves. Gradients in half precision are not exact, so that **the attack may be weaker**: compare
    (docs/performance.md). What it decides without gradients stays in full precision, and so does
    the evaluation.

    Args:
        attack: the attack.
        compile: run networks by `torch.compile`.
        autocast: the precision of the networks' gradients; None leaves it.

    Raises:
        ValueError: neither is wanted, another precision, one within another, or autocast of a PGD
            with `drop_fooled`.
        TypeError: when called on a defense that names no networks.
    """

    compile: bool = False
    autocast: Precision | None = None

    def __post_init__(self) -> None:
        inner = list(parts(self.attack))
        if any(isinstance(part, Accelerated) for part in inner):
            raise ValueError("accelerated twice: give compile and autocast to one of them")
        if self.autocast and any(isinstance(part, PGD) and part.drop_fooled for part in inner):
            raise ValueError(
                "leave out drop_fooled or autocast: who is fooled would be told by rounded logits"
            )
        if not self.compile and self.autocast is None:
            raise ValueError("nothing to accelerate by: give compile=True or autocast")
        if self.autocast is not None and self.autocast not in get_args(Precision):
            raise ValueError(f"autocast must be of {get_args(Precision)}, got {self.autocast!r}")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        with other_forward(defense.networks, self._forward):
            return self.attack.perturb(defense, x, y, generator)

    def _forward(self, plain: Forward) -> Forward:
        quick: Forward = torch.compile(plain) if self.compile else plain

        def forward(x: Tensor) -> Tensor:
            if self.autocast is None or not (torch.is_grad_enabled() and x.requires_grad):
                return quick(x)
            with torch.autocast(x.device.type, getattr(torch, self.autocast)):
                return quick(x).to(x)

        return forward
