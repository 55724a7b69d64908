"""A climb through the sets of members of a randomized ensemble that can be fooled at once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import rows_of
from lightning_rob.attacks.arc import member_order
from lightning_rob.attacks.base import Attack, check_norm, set_step_size
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.sight import image_gradient
from lightning_rob.defenses import Defense
from lightning_rob.defenses.network import network_logits
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Length, Threat, divisor, scale

ALL_SETS = 4  # members up to which every set is tried; of more members chains of sets
CHAINS = 2  # of sets that grow, each from a member that the ones before lack
SIGNED = 0.5  # share of the steps that follow the steepest direction; the others project
BEYOND = 0.2  # distance to aim beyond a decision boundary, as a share of eps, falling to 0
ROUNDING = 1e-6  # of a sum of probabilities
RELAXATION = 1.5  # of the projections, which converge for factors between 0 and 2


@dataclass
class Climb:
    """The best images found so far for those of a batch.

    Args:
        x_best: [B, …] the images that fool the most weight of members.
        right: [B] the probability that the ensemble is right on them.
        fooled: [M, B] the members that they fool.
        possible: [M, B] the members that some image of the ball has fooled.
        kept: [M, B] members that an image has to fool to be taken; None for any image.
    """

    x_best: Tensor
    right: Tensor
    fooled: Tensor
    possible: Tensor
    kept: Tensor | None = None

    def take(self, rows: Tensor, z: Tensor, fooled: Tensor, weights: Tensor) -> None:
        """Keep images z [b, …] of some rows where they are better than the best so far."""
        right = (weights[:, None] * ~fooled).sum(0).to(self.right)
        better = right < self.right[rows]
        if self.kept is not None:
            better &= (fooled | ~self.kept[:, rows]).all(0)
        at = rows[better]
        self.x_best[at], self.right[at] = z[better], right[better]
        self.fooled[:, at] = fooled[:, better]
        self.possible[:, rows] |= fooled


@dataclass(frozen=True)
class LatticeClimber(Attack):
    """Attack a randomized ensemble by the sets of its members, until none larger can be fooled.

    Adaptive PGD and ARC may end at images that fool one member although others in the ball fool
    more. This attack looks for one image that fools all members of a set, for each member alone
    first, then for sets of those members by falling probability: of up to four members for every
    set that would lower the accuracy, of more for a set that grows member by member. An image
    leaves the batch as soon as no set is left to try. The principle, to climb the lattice of sets,
    and the order of members are those of Gnecco Heredia, Negrevergne and Chevaleyre (ECML 2025,
    arXiv 2506.10888). The search for one image is this package's: signed steps on the members that
    are not fooled yet, each gradient divided by its dual norm, then relaxed projections onto the
    linearised boundary that is farthest away.

    Args:
        threat: the ball and the bounds; linf, l2 or l1.
        steps: the largest number of steps for one set; 100 where a point matters.
        step_size: length of the first signed step in pixel units; None is eps / 4.
        classes: number of wrong classes that are tried for each member alone: the runner-up of each
            step, then the next largest logits of the clean image.
    """

    lengths: ClassVar[tuple[str, ...]] = ("step_size",)
    made_for: ClassVar[tuple[str, ...]] = ("randomized",)
    stops_on_gradient_logits: ClassVar[bool] = True
    threat: Threat
    steps: int = 40
    step_size: Length | None = None
    classes: int = 3

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, classes=self.classes)
        set_step_size(self)
        check_norm(self, math.inf, 2, 1)
        if self.threat.relative:
            raise ValueError(f"LatticeClimber is for a radius in pixel units, got {self.threat}")

    def cost(self, count: PassCount) -> int:
        members = len(member_order(count.defense.weights))
        alone = members * min(self.classes, count.classes - 1)
        if members > ALL_SETS:  # each member is added to as many as all others
            sets = alone + CHAINS * (members + 1) - 1
            wanted = alone + CHAINS * (members**2 + 1) - 1
        else:
            sets = alone + 2**members - 1 - members
            wanted = alone + members * 2 ** (members - 1) - members  # in all sets together
        climbing = self.steps * wanted + (self.steps + 1) * sets * count.networks
        return count.networks + climbing

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        weights, order = defense.weights.to(x.device), member_order(defense.weights)
        rows, logits = torch.arange(len(x), device=x.device), _logits(defense, x)
        check_logits(logits, y)
        fooled = logits.argmax(-1) != y
        climb = Climb(x.clone(), x.new_full((len(x),), torch.inf), fooled.clone(), fooled.clone())
        climb.take(rows, x, fooled, weights)
        # The class with the largest logit need not have the nearest boundary.
        others = logits.scatter(2, y.expand(len(logits), -1)[..., None], -torch.inf).argsort(-1)
        for aim in range(min(self.classes, logits.shape[-1] - 1)):
            for member in order:
                wanted = torch.zeros_like(fooled)
                wanted[member] = ~climb.possible[member] & (climb.right > 0)
                classes = others[member, :, -1 - aim] if aim else None
                self._look(defense, x, y, generator, climb, wanted, classes)
        if len(order) <= ALL_SETS:
            for wanted in _sets(climb, order, weights):
                self._look(defense, x, y, generator, climb, wanted)
            return climb.x_best
        seen = torch.zeros_like(fooled)
        for chain in range(CHAINS):
            at = climb
            if chain:  # one member of a set can keep out others that together weigh more
                first = _first(climb.possible & ~seen, order)
                at = Climb(x.clone(), climb.right + torch.inf, first & False, climb.possible, first)
                self._look(defense, x, y, generator, at, first)
            for member in order:
                reachable = at.possible[member] & ~at.fooled[member] & at.right.isfinite()
                wanted = at.fooled & reachable & (weights > 0)[:, None]
                wanted[member] = reachable
                self._look(defense, x, y, generator, at, wanted)
            seen |= at.fooled
            climb.take(rows, at.x_best, at.fooled, weights)
        return climb.x_best

    def _look(
        self,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        climb: Climb,
        wanted: Tensor,
        classes: Tensor | None = None,
    ) -> None:
        """Look for images that fool all wanted members [M, B].

        The search begins at the clean images and aims at classes [B]; without classes it begins at
        the best images so far, and aims at the runner-up of each step.
        """
        rows = wanted.any(0).nonzero()[:, 0]
        if not len(rows):
            return
        wanted, z = wanted[:, rows], (x if classes is not None else climb.x_best)[rows]
        for step in range(self.steps + 1):
            last = step == self.steps
            gaps, gradients, fooled = [], [], []
            for member, of_images in zip(defense.classifiers, wanted, strict=True):
                needed = not last and bool(of_images.any())
                with torch.set_grad_enabled(needed):
                    z = z.detach().requires_grad_(needed)
                    logits = network_logits(member, z)
                if needed:
                    aims = None if classes is None else classes[rows]
                    gap = _gap(logits.float() if logits.itemsize < 4 else logits, y[rows], aims)
                    gradients.append(image_gradient(gap, z, rows_of(generator, rows)))
                    gaps.append(gap.detach().masked_fill(~of_images, -torch.inf))
                fooled.append(logits.argmax(-1) != y[rows])
            found = torch.stack(fooled)
            climb.take(rows, z.detach(), found, defense.weights.to(x.device))
            left = (wanted & ~found).any(0)
            if last or not left.any():
                break
            rows, wanted = rows[left], wanted[:, left]
            wide = torch.promote_types(x.dtype, torch.float32)  # tiny slopes are 0 in float16
            delta = self._moved(
                (z.detach()[left] - x[rows]).to(wide),
                torch.stack(gaps)[:, left].to(wide),
                torch.stack(gradients)[:, left].to(wide),
                x[rows].to(wide),
                step / self.steps,
            ).to(x)
            z = self.threat.apply(self.threat.clip(delta, x[rows]), x[rows])

    def _moved(
        self, delta: Tensor, gaps: Tensor, gradients: Tensor, x: Tensor, done: float
    ) -> Tensor:
        """Return perturbations [b, …] one step on, of which a share is done.

        The gaps [m, b] are leads of the true class, -inf for members that are not wanted.
        """
        eps = self.threat.eps
        slopes = torch.stack([self.threat.dual(gradient) for gradient in gradients])
        # to the linearised boundary, in the norm of the threat; without a slope there is no way
        distances = torch.where(slopes > 0, gaps / slopes, -torch.inf)
        if done < SIGNED:
            # Divided by its slope a member counts by distance, however large its logits are.
            pull = (distances > -BEYOND * eps) / divisor(slopes)
            total = torch.stack([scale(g, share) for g, share in zip(gradients, pull, strict=True)])
            stride = (self.step_size or eps / 4) * (1 - 0.9 * done / SIGNED)
            way = -total.sum(0)
            if self.threat.p == 1:  # a sparse step must not be spent on pixels at their bounds
                way = self.threat.free(way, x + delta)
            return delta + stride * self.threat.direction(way)
        # Projections onto the farthest of several half-spaces converge to a point of all of them.
        far, images = distances.argmax(0), torch.arange(len(x), device=x.device)
        g = gradients[far, images]
        # Pixels at their limit stay there: the others have to go the whole way.
        low, high = self.threat.bounds[0] - x, self.threat.bounds[1] - x
        if self.threat.p == math.inf:
            low, high = low.clamp_min(-eps), high.clamp_max(eps)
        g = g.masked_fill((delta <= low) & (g > 0) | (delta >= high) & (g < 0), 0)
        largest = g.flatten(1).abs().amax(1)
        g = scale(g, 1 / divisor(largest))  # whose squares do not underflow
        squares = g.flatten(1).square().sum(1)
        way = gaps[far, images] + (1 - done) * BEYOND * eps * slopes[far, images]
        length = RELAXATION * way / (largest * squares)
        # Without a pixel that can move, or with an infinite gap, the image stays where it is.
        return delta - scale(g, torch.where((squares > 0) & length.isfinite(), length, 0.0))


@torch.no_grad()
def _logits(defense: Defense, z: Tensor) -> Tensor:
    return torch.stack([network_logits(member, z) for member in defense.classifiers])


def _gap(logits: Tensor, y: Tensor, classes: Tensor | None) -> Tensor:
    """Return by how much [b] the true class leads another one, the runner-up for None."""
    right = logits.gather(1, y[:, None])[:, 0]
    if classes is not None:
        return right - logits.gather(1, classes[:, None])[:, 0]
    return right - logits.scatter(1, y[:, None], -torch.inf).amax(1)


def _first(left: Tensor, order: list[int]) -> Tensor:
    """Return the first of the members [M, B] that are left, by image."""
    first = torch.zeros_like(left)
    for member in order:
        first[member] = left[member] & ~first.any(0)
    return first


def _sets(climb: Climb, order: list[int], weights: Tensor) -> Iterator[Tensor]:
    """Yield the members [M, B] to be fooled next, by image; none of an image that is decided.

    Each set is chosen by what has been found until then.
    """
    sets = [list(one) for size in range(2, len(order) + 1) for one in combinations(order, size)]
    for one in sorted(sets, key=lambda one: -float(weights[one].sum())):
        rest = weights.sum() - weights[one].sum()
        # A set with a member that cannot be fooled alone is out of reach.
        reachable = (climb.right > rest + ROUNDING) & climb.possible[one].all(0)
        wanted = torch.zeros_like(climb.fooled)
        wanted[one] = reachable
        yield wanted
