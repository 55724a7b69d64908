"""Fast Adaptive Boundary attack: the smallest perturbation, by steps to linearised boundaries."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack, check_norm
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.foreign import scores
from lightning_rob.attacks.sight import image_gradient
from lightning_rob.attacks.targeted import wrong_classes
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat, choose, divisor, scale

ALPHA = 0.1  # largest share of the projection of the image itself in a step
BETA = 0.9  # share of the distance that remains in the step back towards the image
ETA = 1.05  # length of a step, in distances to the boundary
STEPS_BETWEEN_LOOKS = 4  # of Newton's method on a GPU
SHORTEST = 1e-8  # smallest distance to a boundary, as in the authors' code


@dataclass(frozen=True)
class FAB(Attack):
    """Fast Adaptive Boundary attack (Croce and Hein 2020b, Algorithm 1).

    Each step linearises the boundary between the label and another class, and moves beyond the
    projections onto it, within the bounds, of the iterate and, by a share alpha, of the image:
    x_k+1 = (1 - alpha) (x_k + eta d(x_k)) + alpha (x + eta d(x)). From an iterate that is
    misclassified the search goes back towards the image, x + beta (x_k+1 - x). An image is returned
    as soon as it is misclassified within the ball; else unchanged.

    It attacks the mean prediction of a defense, `lightning_rob.attacks.foreign.scores`, as
    AutoAttack does.

    Args:
        threat: the ball and the bounds; linf, l2 or l1.
        targets: number of wrong classes, by falling score of the clean image, whose boundaries are
            searched, each in a run of its own; with more than there are, all of them.
    """

    threat: Threat
    steps: int = 100
    targets: int = 9
    draws: int | None = None

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, targets=self.targets, draws=self.draws)
        check_norm(self, math.inf, 2, 1)

    def cost(self, count: PassCount) -> int:
        run = 3 * self.steps  # linearise, differentiate, evaluate
        return count.drawn(self.draws) * (1 + min(self.targets, count.classes - 1) * run)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        noise, y = derived(generator, 0), y.long()
        with torch.no_grad():
            clean = scores(defense, x, noise, self.draws)
        check_logits(clean[None], y)
        order = wrong_classes(clean, y)
        left = Search(positions(x), x, y, noise, x, order).select(clean.argmax(-1) == y)
        x_final = x.clone()
        for rank in range(min(self.targets, order.shape[1])):
            if not len(left):
                break
            # Each target has a run of its own, from the image.
            noise, target = derived(left.generator, rank + 1), left.classes[:, rank, None]
            run = Search(positions(left.x), left.x, left.y, noise, left.x, target)
            x_adv, found = self._search(defense, run)
            x_final[left.index[found]] = x_adv[found]
            left = left.select(~found)
        return x_final

    def _search(self, defense: Defense, run: "Search") -> tuple[Tensor, Tensor]:
        """Return images [b, …], and which of them are misclassified within the ball [b]."""
        x_adv, found = run.x.clone(), torch.zeros_like(run.y, dtype=torch.bool)
        for _ in range(self.steps):
            z = run.x_adv.detach().requires_grad_()
            values = scores(defense, z, run.generator, self.draws)
            gap = (values.gather(1, run.y[:, None]) - values.gather(1, run.classes))[:, 0].to(z)
            normal, gap = image_gradient(gap, z, run.generator), gap.detach()
            # Beyond the hyperplane, from z and from x. The image's own projection pulls the next
            # iterate towards it: small perturbations win.
            x, z = run.x, z.detach()
            gap_of_x = gap + (normal * (x - z)).flatten(1).sum(1)
            points, normals = torch.cat([z, x]), torch.cat([normal, normal])
            delta = to_hyperplane(points, normals, torch.cat([gap, gap_of_x]), self.threat)
            of_z, of_x = divisor(self.threat.size(delta), SHORTEST).chunk(2)
            alpha = (of_z / (of_z + of_x)).clamp_max(ALPHA)
            beyond_z, beyond_x = (points + ETA * delta).chunk(2)
            mixed = scale(beyond_z, 1 - alpha) + scale(beyond_x, alpha)
            run.x_adv = mixed.clamp(*self.threat.bounds)
            with torch.no_grad():
                wrong = scores(defense, run.x_adv, run.generator, self.draws).argmax(-1) != run.y
            inside = wrong & (self.threat.distance(run.x_adv, run.x) <= self.threat.eps)
            found[run.index] = inside
            x_adv[run.index] = run.x_adv  # final for the images that leave now
            rows = (~inside).nonzero()[:, 0]
            run, wrong = run.select(rows), wrong[rows]
            if not len(run):
                break
            run.x_adv = choose(wrong, run.x + BETA * (run.x_adv - run.x), run.x_adv)
        return x_adv, found


@dataclass
class Search(ActiveBatch):
    """The searches of the images that are not found yet."""

    x_adv: Tensor  # [b, C, H, W] the iterates
    classes: Tensor  # [b, G] wrong classes; the first one's boundary is searched


def to_hyperplane(x: Tensor, w: Tensor, gap: Tensor, threat: Threat) -> Tensor:
    """Return the shortest d [B, …] with w.d = -gap and x + d within the bounds, or the closest."""
    # d = -sign(w) min(lambda |w|^(q-1), room to the bound), pixel by pixel. Newton's method finds
    # lambda: w.d is concave in it, and linear between the pixels' arrivals at their bounds, so that
    # the steps never overshoot and end at the exact solution.
    # In place, and by products with masks of 0 and 1, which are faster than `where` on a CPU.
    flat, at, (low, high) = w.flatten(1), x.flatten(1), threat.bounds
    size = flat.abs()
    largest = divisor(size.amax(1))
    size, gap, side = scale(size, 1 / largest), gap.abs() / largest, gap.sign()
    sign = flat.sign().mul_(side[:, None])
    moves = sign.abs()
    room = (at - (low + high) / 2).mul_(sign).add_((high - low) / 2).mul_(moves)
    if threat.p == 1:  # one pixel after the other goes to its bound, by falling gradient
        size, order = size.sort(1, descending=True)
        share, room = size * room.gather(1, order), room.gather(1, order)
        left = (gap[:, None] - share.cumsum(1) + share).clamp_min(0)
        moved = torch.minimum((left / divisor(size)).clamp_max(torch.finfo(x.dtype).max), room)
        return torch.zeros_like(flat).scatter(1, order, moved).mul_(sign).neg_().view_as(x)
    speed, slope = (moves, size) if threat.p == math.inf else (size, size.square())
    reach, length, most = size * room, torch.zeros_like(gap), torch.finfo(gap.dtype).max
    # A GPU waits at each look, and steps beyond the solution change nothing.
    every = 1 if x.device.type == "cpu" else STEPS_BETWEEN_LOOKS
    for step in range(1, flat.shape[1] + 2):
        arrived = (length[:, None] * speed).ge_(room)
        left = gap - (reach * arrived).sum(1)
        further = (left / divisor((slope * (1 - arrived)).sum(1))).clamp_max(most)
        if step % every == 0 and not (further > length).any():
            break
        length = torch.maximum(further, length)
    return torch.minimum(length[:, None] * speed, room).mul_(sign).neg_().view_as(x)
