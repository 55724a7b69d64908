"""Equal changes of a few pixels: an attack within l2 and l1 on networks that round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.attacks.pgd import better
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Loss, expected_margin
from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, divisor, per_image, scale

RATIO = 1.5  # of neighbouring numbers of pixels that are tried at first
REACH = 4  # largest factor of the numbers that a later step tries; most factors are near 1
KEPT = 0.75  # share of the earlier gradients that a step keeps
ROOM = 0.999  # of a change without which a pixel is too near to its bound


@dataclass(frozen=True)
class FewPixels(Attack):
    """Equal changes of the pixels with the largest gradients, for networks that round or compare.

    Within l2 and l1 a small change of all pixels crosses no threshold of such a network, but the
    radius suffices to move some pixels across. k of them change by eps / k^(1/p) each, by the
    signs of a decaying sum of gradients at noisy images. The first step tries numbers k from 1 to
    all pixels, each later one three for each image; it goes on from the best of them. A network
    that rounds has no gradients: this attack is for those of `SurrogateGradient`.

    Args:
        objective: the objective to maximise, one of `lightning_rob.objectives`.
        noise: standard deviation of the noise at which gradients are taken, as a share of the
            range of pixels. Gradients of a rounded image itself lead less far.
    """

    threat: Threat
    steps: int = 20
    objective: Loss = expected_margin
    noise: float = 0.1

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)
        at_least(0, noise=self.noise)
        check_norm(self, 2, 1)

    def cost(self, count: PassCount) -> int:
        return count.networks * (5 * self.steps - 3 + len(_numbers(count.x)))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        low, high = self.threat.bounds
        objective, total = ObjectiveGradient(self.objective), torch.zeros_like(x)
        best, best_value = x, x.new_full((len(x),), -torch.inf)
        x_adv, pixels = x, torch.ones(len(x), device=x.device)  # half precision ends at 65,504
        for step in range(self.steps):
            noise = self.noise * (high - low) * normal(x, *x.shape[1:], generator=generator)
            at = objective(defense, (x_adv + noise).clamp(low, high), y, generator, step == 0)
            length = divisor(at.gradient.flatten(1).norm(dim=1))
            total = KEPT * total + scale(at.gradient, 1 / length)
            factors = REACH ** (2 * uniform(x, 2, generator=generator) - 1) ** 3
            tried = [pixels, *(pixels[:, None] * factors).unbind(1)]
            tried = tried if step else [pixels * number for number in _numbers(x)]
            value = torch.full_like(best_value, -torch.inf)
            for number in tried:
                number = number.clamp(1, x[0].numel())
                candidate = self._changed(x, total, number.round())
                with torch.no_grad():
                    reached = objective.value(defense, candidate, y, generator)
                pixels = torch.where(reached > value, number, pixels)
                x_adv, value = better(x_adv, value, candidate, reached)
            best, best_value = better(best, best_value, x_adv, value)
        return best

    def _changed(self, x: Tensor, total: Tensor, pixels: Tensor) -> Tensor:
        """Return images of which N pixels [B] change, those with the largest sums [B, …]."""
        low, high = self.threat.bounds
        length = self.threat.eps * self.threat.unit(x) * pixels.to(x) ** (-1 / self.threat.p)
        room = torch.where(total > 0, high - x, x - low)
        gain = total.abs() * (room >= per_image(ROOM * length, x))
        ordered = gain.flatten(1).sort(1, descending=True).values
        least = ordered.gather(1, pixels.long()[:, None] - 1)[:, 0]
        chosen = (gain >= per_image(least, x)) & (gain > 0)
        return self.threat.project(x + scale(total.sign() * chosen, length), x)


def _numbers(x: Tensor) -> list[float]:
    """Return the numbers of pixels that the first step tries, up to all of an image's."""
    numbers, pixels = [1.0], x[0].numel()
    while numbers[-1] * RATIO <= pixels:
        numbers.append(numbers[-1] * RATIO)
    return numbers
