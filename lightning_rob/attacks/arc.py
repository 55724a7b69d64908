"""ARC, an attack on randomized ensembles member by member (Dbouk and Shanbhag, ICML 2022)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.active_set import ActiveBatch, positions
from lightning_rob.attacks.base import Attack, check_norm, check_start, set_step_size
from lightning_rob.attacks.budget import PassCount
from lightning_rob.attacks.sight import image_gradient
from lightning_rob.defenses import Defense
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.defenses.network import network_logits
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Length, Threat, choose, divisor, guard, scale

GUARD = 1e-10  # added to divisors, as in the authors' code
RHO = 0.05  # distance to aim beyond a decision boundary, as a share of eps


def member_order(probs: Tensor) -> list[int]:
    """Return the members by falling probability; among equals the later one first."""
    # The authors sort this way. A step towards the boundary of a member of probability 0 could only
    # cost success on the others.
    order, positive = probs.argsort(stable=True).flip(0).tolist(), (probs > 0).tolist()
    return [member for member in order if positive[member]]


@dataclass
class Search(ActiveBatch):
    """The perturbations of the images that are still attacked."""

    delta: Tensor  # [b, C, H, W] the current perturbations
    acc_best: Tensor  # [b] the expected accuracy to beat, the lowest one so far
    acc_current: Tensor  # [b] the expected accuracy at x + delta


@dataclass(frozen=True)
class ARC(Attack):
    """Attack a randomized ensemble member by member (ARC paper, Algorithm 2).

    Each local step moves to the nearest decision boundary of one member, the most probable member
    first, and only so far that it does not undo the success on earlier members. A step is kept if
    the expected accuracy does not rise.

    Args:
        threat: the ball and the bounds; linf or l2.
        steps: iterations over all members, K in the paper.
        step_size: radius of the local steps in pixel units, eta in the paper. None is the
            paper's: eps for linf and the step size of PGD, eps / 4, for l2.
        neighbours: number of competing classes searched for the nearest boundary, those with the
            largest logits, G in the paper; None searches all.
        random_start: start from a random point of the ball.
        start: start from the images that this attack of the same threat returns, where they are no
            worse than the clean ones: ARC is then never weaker than it. None is the clean images,
            as in the paper.
        early_stop: stop on images that every member misclassifies, and on images that an iteration
            left unchanged. Never raises the accuracy, up to rounding, which depends on the batch
            size. Members must be deterministic.
    """

    lengths: ClassVar[tuple[str, ...]] = ("step_size",)
    made_for: ClassVar[tuple[str, ...]] = ("randomized",)
    threat: Threat
    steps: int
    step_size: Length | None = None
    neighbours: int | None = None
    random_start: bool = False
    start: Attack | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, neighbours=self.neighbours)
        set_step_size(self)
        check_norm(self, math.inf, 2)
        check_start(self)
        if self.threat.relative:
            raise ValueError(f"ARC is for a radius in pixel units, got {self.threat}")

    @property
    def local_radius(self) -> float:
        """Radius of the local steps in pixel units: `step_size`, or the paper's."""
        paper = self.threat.eps / (4 if self.threat.p == 2 else 1)
        return paper if self.step_size is None else self.step_size

    def cost(self, count: PassCount) -> int:
        gradients = min(self.neighbours or count.classes, count.classes - 1)
        members = len(member_order(count.defense.weights))
        step = members * (1 + gradients + count.networks)  # each scores a candidate on all
        start = self.start.cost(count) if self.start else 0
        begin = count.networks * (2 if self.random_start or self.start else 1)
        return start + begin + self.steps * step

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        members, weights = defense.classifiers, defense.weights
        order, delta = member_order(weights), torch.zeros_like(x)
        acc_best = acc_current = expected_accuracy(members, weights, x, y, check=True)
        if self.random_start:
            # As in the authors' code the accuracy to beat is the clean image's.
            delta = self.threat.start(x, generator) - x
            acc_current = expected_accuracy(members, weights, x + delta, y)
        elif self.start:
            x_start = self.start.perturb(defense, x, y, generator)
            acc_start = expected_accuracy(members, weights, x_start, y)
            delta = choose(acc_start <= acc_best, x_start - x, delta)
            acc_best = acc_current = torch.minimum(acc_start, acc_best)
        search = Search(positions(x), x, y, generator, delta.clone(), acc_best, acc_current)
        if self.early_stop:
            search = search.select(search.acc_current > 0)
        for _ in range(self.steps):
            if not len(search):
                break
            after = self._iterate(members, weights, order, search)
            delta[after.index] = after.delta
            if self.early_stop:
                same = (after.delta == search.delta).flatten(1).all(1)
                same &= after.acc_best == search.acc_best
                same &= after.acc_current == search.acc_current
                after = after.select(~same & (after.acc_current > 0))
            search = after
        return self.threat.apply(delta, x)

    def _iterate(
        self, members: Sequence[nn.Module], weights: Tensor, order: list[int], at: Search
    ) -> Search:
        """Return the search after one pass over the members, in which each takes a local step."""
        x, delta_local = at.x, torch.zeros_like(at.x)
        # Carried along, so that no perturbation is evaluated twice.
        acc_local, acc_reached = at.acc_best, at.acc_current
        for rank, member in enumerate(order):
            z = (x + at.delta + delta_local).detach().requires_grad_()
            logits = network_logits(members[member], z)
            count = min((self.neighbours or logits.shape[-1]), logits.shape[-1] - 1)
            top = logits.topk(count + 1).values  # the predicted class and its competitors
            w, distance = nearest_boundary(top[:, :1] - top[:, 1:], z, self.threat, at.generator)
            length = torch.full_like(distance, self.local_radius)
            if rank:
                # Projected back onto the sphere of the local radius eta, the step still ends
                # beyond the boundary: beta in the paper.
                eta, least, slope = length, guard(length, GUARD), self.threat.dual(w)
                gap = ((w * delta_local).flatten(1).sum(1) / (slope + least) + distance).abs()
                beyond = eta / (eta - distance + least) * gap + RHO * self.threat.eps
                length = torch.where(distance < eta, beyond, eta)
            step = delta_local + scale(self.threat.steepest(-w), length)
            # All members share one radius: a step for a later one takes length from the others.
            size = self.threat.size(step)
            step = scale(step, self.local_radius / (size + guard(size, GUARD)))
            candidate = x + self.threat.clip(at.delta + step, x)
            acc_candidate = expected_accuracy(members, weights, candidate, at.y)
            # On ties the step is kept: a later member may need it to be fooled as well.
            accept = acc_candidate <= acc_local
            delta_local = choose(accept, step, delta_local)
            acc_reached = torch.where(accept, acc_candidate, acc_reached)
            acc_local = torch.where(accept, acc_candidate, acc_local)
        accept = acc_reached <= at.acc_best
        return replace(
            at,
            delta=choose(accept, self.threat.clip(at.delta + delta_local, x), at.delta),
            acc_best=torch.where(accept, acc_reached, at.acc_best),
            acc_current=torch.where(accept, acc_reached, at.acc_current),
        )


def nearest_boundary(
    gaps: Tensor, z: Tensor, threat: Threat, generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Return normal [B, …] and distance [B] of the nearest of the boundaries gaps(z) [B, G] = 0."""
    normal, distance = torch.zeros_like(z), z.new_full((len(z),), torch.inf)
    for rank, gap in enumerate(gaps.to(z).unbind(1), 1):
        w = image_gradient(gap, z, generator, keep=rank < gaps.shape[1])
        slope = threat.dual(w)
        zeta = gap.detach().abs() / (slope + guard(slope, GUARD))
        normal, distance = choose(zeta < distance, w, normal), torch.minimum(zeta, distance)
    return normal, distance


@torch.no_grad()
def expected_accuracy(
    members: Sequence[nn.Module], weights: Tensor, x: Tensor, y: Tensor, check: bool = False
) -> Tensor:
    """Return the probability [B] that a randomly drawn member is correct, L(x) in the paper."""
    logits = torch.stack([network_logits(member, x) for member in members])
    if check:
        check_logits(logits, y)
    return random_member(logits, weights).gather(1, y[:, None])[:, 0]


def arc_linear(
    weights: Tensor,
    biases: Tensor,
    probs: Sequence[float] | Tensor,
    x: Tensor,
    y: Tensor,
    threat: Threat,
) -> Tensor:
    """Perturb points by ARC on binary linear classifiers sgn(w.x + b) (Algorithm 1), any p >= 1.

    The attack is consistent (Theorem 5.1): if every member is correct and one can be fooled, it
    fools one.

    Args:
        weights: [M, D] or [M, C, H, W], the w of each member.
        biases: [M], the b of each member.
        probs: [M] sampling probabilities.
        x: [B, …] points, of the shape of a w.
        y: [B] labels in {-1, +1}.
        threat: norm and radius; its bounds are not used, as in the paper.
    """
    if not ((y == 1) | (y == -1)).all():
        raise ValueError(f"labels must be -1 or +1, got {sorted(set(y.tolist()))}")
    flat, sign = x.flatten(1), y.to(x.dtype)
    w, b = weights.flatten(1).to(flat), biases.to(flat)
    alpha = sampling_probabilities(probs, len(w)).to(flat)

    def accuracy(points: Tensor) -> Tensor:
        return ((sign[:, None] * (points @ w.T + b) > 0).to(alpha) * alpha).sum(1)

    delta, acc_best, norms = torch.zeros_like(flat), accuracy(flat), threat.dual(w)
    for rank, i in enumerate(member_order(alpha)):
        # Away from the side of the label: w points to the class +1.
        direction = -scale(threat.steepest(w[i : i + 1]).expand_as(flat), sign)
        zeta = (flat @ w[i] + b[i]).abs() / norms[i]
        length = torch.full_like(zeta, threat.eps)
        if rank:
            gap = (sign * (delta @ w[i]) / norms[i] + zeta).abs()
            beyond = threat.eps / (threat.eps - zeta) * gap + RHO * threat.eps
            length = torch.where(zeta < threat.eps, beyond, length)
        step = delta + scale(direction, length)
        step = scale(step, threat.eps / divisor(threat.size(step), GUARD))
        acc_candidate = accuracy(flat + step)
        delta = choose(acc_candidate <= acc_best, step, delta)
        acc_best = torch.minimum(acc_candidate, acc_best)
    return (flat + delta).view_as(x)
