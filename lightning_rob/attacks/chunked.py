"""An attack whose memory does not grow with the batch."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks.around import AttackDecorator
from lightning_rob.attacks.base import is_batch_separable, parts
from lightning_rob.attacks.oom import kept_for_gradients, run_in_chunks
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import restricted_to
from lightning_rob.randomness import Generator

GRADIENTS = 2.0  # beside what autograd keeps: the gradients themselves, and what kernels work in


@dataclass(frozen=True)
class Chunked(AttackDecorator):
    """Another attack, on a few images at a time: the same but for rounding, in less memory.

    Args:
        attack: which attacks each image by itself.
        images: how many at a time.
        memory: in GiB, in place of `images`: as many at a time as will do with about so much, at
            least one; for each batch one image is attacked to find out, and two.

    Raises:
        ValueError: neither or both of images and memory, one that is no positive number, or an
            attack that goes by whole batches.
        TypeError: when called, what is attacked goes by whole batches.
    """

    images: int | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if (self.images is None) == (self.memory is None):
            raise ValueError(
                f"give images or memory, got images={self.images} and memory={self.memory}"
            )
        for name in ("images", "memory"):
            value, kind = getattr(self, name), int if name == "images" else (int, float)
            number = isinstance(value, kind) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                unit = "a positive number of GiB" if name == "memory" else "a positive whole number"
                raise ValueError(f"{name} must be {unit}, got {value!r}")
        if whole := [type(part).__name__ for part in parts(self.attack) if part.batch_dependent]:
            raise ValueError(
                f"{whole[0]} attacks whole batches and cannot be chunked: put Chunked around an "
                "attack inside it, if it has one"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        if not is_batch_separable(self.attack, defense):
            kind = type(defense).__name__
            raise TypeError(f"{kind} adapts to whole batches: an attack on it cannot be chunked")
        count = self.images or self._fitting(defense, x)
        return run_in_chunks(self.attack, count, defense, x, y, generator)

    def _fitting(self, defense: Defense, x: Tensor) -> int:
        """How many images the memory is enough for; at least one."""
        chance = torch.Generator().manual_seed(0)
        some = torch.arange(min(2, len(x)), device=x.device)
        with torch.no_grad(), restricted_to(defense, some):
            y = defense(x[some], chance).argmax(1)  # right, so that every attack takes a gradient
        kept = []
        for part in (some[:1], some):
            with restricted_to(defense, part):
                attack = partial(self.attack.perturb, defense, x[part], y[part], chance)
                kept.append(kept_for_gradients(attack))
        one, two = kept
        each = GRADIENTS * max(two - one, 1)  # what both keep is there anyway: weights
        return min(max(int((self.memory or 0) * 2**30 / each), 1), len(x))
