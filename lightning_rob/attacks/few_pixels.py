"""Changes of a few pixels: an attack within l2 and l1 on networks that round."""

from collections.abc import Callable
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
ROUNDING = 1e-5  # of the radius, by which sums of changes may be above it


@dataclass(frozen=True)
class FewPixels(Attack):
    """Changes of the pixels that gain most for their length, for networks that round or compare.

    Within l2 and l1 a small change of all pixels crosses no threshold of such a network, but the
    radius suffices to move some pixels across. Each pixel changes by its length c or not at all, by
    the sign of a decaying sum g of gradients at noisy images; those with the largest |g| / c^p
    change, as many as the radius takes. A network that rounds has no gradients: this attack is for
    those of `SurrogateGradient`.

    Args:
        objective: the objective to maximise, one of `lightning_rob.objectives`.
        noise: standard deviation of the noise at which gradients are taken, as a share of the
            range of pixels. Gradients of a rounded image itself lead less far.
        draws: of random defenses for each value and gradient; then the last step counts, because
            the best of noisy values would be the luckiest.
        bisections: those that find the smallest change of each pixel, upwards and downwards, which
            changes what the first part `enter` of a `SurrogateGradient` is given; it must get
            images of which each pixel depends on the same pixel alone. With 0 all pixels change by
            one length, eps / k^(1/p) for k pixels: the first step tries numbers k from 1 to all,
            each later one three for each image, and it goes on from the best.
    """

    threat: Threat
    steps: int = 20
    objective: Loss = expected_margin
    noise: float = 0.1
    draws: int | None = None
    bisections: int = 0

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, draws=self.draws)
        at_least(0, noise=self.noise, bisections=self.bisections)
        if self.draws and self.bisections:
            raise ValueError("bisections are for networks without noise: give draws or bisections")
        check_norm(self, 2, 1)

    def cost(self, count: PassCount) -> int:
        equal = 5 * self.steps - 3 + len(_numbers(count.x))
        known = 3 * self.steps + 2 * self.bisections + 4
        return count.drawn(self.draws) * (known if self.bisections else equal)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        low, high = self.threat.bounds
        known = self._thresholds(defense, x, generator) if self.bisections else None
        objective, total = ObjectiveGradient(self.objective, self.draws), torch.zeros_like(x)
        best, best_value = x, x.new_full((len(x),), -torch.inf)
        x_adv, pixels = x, torch.ones(len(x), device=x.device)  # half precision ends at 65,504
        for step in range(self.steps):
            noise = self.noise * (high - low) * normal(x, *x.shape[1:], generator=generator)
            at = objective(defense, (x_adv + noise).clamp(low, high), y, generator, step == 0)
            # Divided by the largest first, for squares may be infinite.
            gradient = scale(at.gradient, 1 / divisor(at.gradient.flatten(1).abs().amax(1)))
            length = divisor(gradient.flatten(1).norm(dim=1))
            total = KEPT * total + scale(gradient, 1 / length)
            factors = REACH ** (2 * uniform(x, 2, generator=generator) - 1) ** 3
            tried = [pixels, *(pixels[:, None] * factors).unbind(1)]
            tried = tried if step else [pixels * number for number in _numbers(x)]
            value = torch.full_like(best_value, -torch.inf)
            for number in tried if known is None else tried[:1]:
                number = number.clamp(1, x[0].numel())
                lengths = self._equal(x, number.round()) if known is None else known
                candidate = self._changed(x, total, torch.where(total > 0, *lengths))
                with torch.no_grad():
                    reached = objective.value(defense, candidate, y, generator)
                pixels = torch.where(reached > value, number, pixels)
                x_adv, value = better(x_adv, value, candidate, reached)
            best, best_value = better(best, best_value, x_adv, value)
        return x_adv if self.draws else best

    def _equal(self, x: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the length of equal changes of N pixels [B], infinite where there is no room."""
        low, high = self.threat.bounds
        length = self.threat.radius(x) * pixels.to(x) ** (-1 / self.threat.p)
        rooms = high - x, x - low
        most = torch.maximum(*rooms).flatten(1).amax(1)  # a larger radius holds every image
        length = per_image(torch.minimum(length, most), x)
        up, down = (torch.where(room >= ROOM * length, length, torch.inf) for room in rooms)
        return up, down

    def _thresholds(
        self, defense: Defense, x: Tensor, generator: Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the smallest changes [B, …] up and down that the network sees, or infinity."""
        given: Callable[..., Tensor] | None = getattr(defense, "given", None)
        if given is None:
            raise ValueError("bisections need a SurrogateGradient around the attack")
        low, high = self.threat.bounds
        seen = given(x, generator)
        if seen.shape != x.shape:
            raise ValueError(f"bisections need a part that gets {[*x.shape]}, got {[*seen.shape]}")

        def crosses(change: Tensor) -> Tensor:
            return given((x + change).clamp(low, high), generator) != seen

        found = []
        for sign, room in ((1, high - x), (-1, x - low)):
            below = torch.zeros_like(x)
            above = torch.minimum(room, per_image(self.threat.radius(x), x))
            possible = crosses(sign * above)
            for _ in range(self.bisections):
                middle = (below + above) / 2
                crossed = crosses(sign * middle)
                below = torch.where(crossed, below, middle)
                above = torch.where(crossed, middle, above)
            found.append(torch.where(possible, above, torch.inf))
        some = (uniform(x, *x.shape[1:], generator=generator) < 0.5) & found[0].isfinite()
        if bool((crosses(torch.where(some, found[0], 0.0)) != some).any()):
            raise ValueError("bisections need a part that is given each pixel by itself")
        return found[0], found[1]

    def _changed(self, x: Tensor, total: Tensor, length: Tensor) -> Tensor:
        """Return images in which the pixels change that gain most for their lengths [B, …]."""
        cost = (length**self.threat.p).flatten(1)
        order = (total.abs().flatten(1) / cost).argsort(dim=1, descending=True, stable=True)
        most = (self.threat.radius(x) * (1 + ROUNDING)) ** self.threat.p
        taken = cost.gather(1, order).cumsum(1) <= most[:, None]
        chosen = torch.zeros_like(taken).scatter(1, order, taken).view_as(x) & (total != 0)
        return self.threat.project(torch.where(chosen, x + total.sign() * length, x), x)


def _numbers(x: Tensor) -> list[float]:
    """Return the numbers of pixels that the first step tries, up to all of an image's."""
    numbers, pixels = [1.0], x[0].numel()
    while numbers[-1] * RATIO <= pixels:
        numbers.append(numbers[-1] * RATIO)
    return numbers
