"""ARC, the attack that does not lose sight of single members (Dbouk and Shanbhag, ICML 2022)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.members import Strongest
from lightning_rob.defenses import Defense
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.objectives import check_logits
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.threat import Threat, pixels, scale

GUARD = 1e-10  # the authors' guard of every division
RHO = 0.05  # how far behind a decision boundary to aim, as a share of eps


def member_order(probs: Tensor) -> list[int]:
    """Members by falling probability; among equals the later one first, as the authors sort.

    Members that never answer are left out: moving towards them costs accuracy elsewhere.
    """
    order: list[int] = probs.argsort(stable=True).flip(0).tolist()
    return [member for member in order if probs[member] > 0]


def _among(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Per image, a where the condition [B] holds, else b [B, …]."""
    return torch.where(condition.view(-1, *[1] * (a.dim() - 1)), a, b)


def _differ(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor:
    """Of which images anything has changed: [B]."""
    changes = [(a != b).view(len(a), -1).any(1) for a, b in zip(before, after, strict=True)]
    return torch.stack(changes).any(0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


@dataclass(frozen=True)
class ARC(Attack):
    """Attack a randomized ensemble member by member (ARC paper, Algorithm 2).

    Each local step moves to the nearest decision boundary of one member, starting with the most
    probable one, just far enough not to undo what fooled those before it, and is kept if the
    expected accuracy does not rise.

    Args:
        threat: the ball and the bounds; linf or l2.
        steps: iterations over all members, K in the paper.
        step_size: radius of the local steps in pixel units, eta in the paper; the paper uses eps
            for linf and the step of PGD for l2.
        neighbours: competing classes searched for the nearest boundary, those with the largest
            logits, G in the paper; None searches all.
        random_start: start from a random point of the ball.
        start: search on from the images that this attack finds, where they are no worse than the
            clean ones: never weaker than it. None starts at the images, as the paper does.
        early_stop: stop on images that every member already gets wrong, and on those that an
            iteration has left as they were, as the next one would, and save their cost. Raises no
            accuracy; without a random start it only changes which of several perfect perturbations
            is returned, but for rounding: matrix products of fewer images may round otherwise.
            Members must have no chance in them.

    Raises:
        ValueError: a count below 1, a step size that is not positive, another norm, a start of
            another threat or beside a random one.
    """

    lengths: ClassVar[tuple[str, ...]] = ("step_size",)
    made_for: ClassVar[tuple[str, ...]] = ("randomized",)
    threat: Threat
    steps: int
    step_size: float
    neighbours: int | None = None
    random_start: bool = False
    start: Attack | None = None
    early_stop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_size", pixels(self.step_size))
        for name, count in {"steps": self.steps, "neighbours": self.neighbours}.items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not self.step_size > 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if self.threat.p not in (2, float("inf")):
            raise ValueError(f"ARC is for linf and l2, not for norm {self.threat.norm}")
        if self.threat.relative:
            raise ValueError(f"ARC is for a radius in pixel units, got {self.threat}")
        if self.start and (self.random_start or self.start.threat != self.threat):
            raise ValueError(
                f"start must be of threat {self.threat}, without random_start, got {self.start}"
            )

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        members, weights = defense.classifiers, defense.weights
        delta = torch.zeros_like(x)
        best = here = expected_accuracy(members, weights, x, y, check=True)
        if self.random_start:
            # The authors' score to beat stays that of the clean image.
            delta = self.threat.start(x, generator) - x
            here = expected_accuracy(members, weights, x + delta, y)
        elif self.start:
            found = self.start.perturb(defense, x, y, generator)
            score = expected_accuracy(members, weights, found, y)
            delta = _among(score <= best, found - x, delta)
            best = here = torch.minimum(score, best)
        moved = torch.ones_like(here, dtype=torch.bool)
        for _ in range(self.steps):
            going_on = moved & (here > 0) if self.early_stop else moved
            live = going_on.nonzero()[:, 0]
            if not len(live):
                break
            before = delta[live], best[live], here[live]
            after = self._iterate(members, weights, x[live], y[live], *before)
            delta[live], best[live], here[live] = after
            if self.early_stop:
                moved[live] = _differ(before, after)
        return self.threat.apply(delta, x)

    def _iterate(
        self,
        members: Sequence[nn.Module],
        weights: Tensor,
        x: Tensor,
        y: Tensor,
        delta: Tensor,
        best: Tensor,
        here: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over the members.

        `best` [B] is the lowest expected accuracy so far, `here` [B] the one at x + delta, and
        `there` the one at x + delta + local, so that nothing is evaluated twice.
        """
        local, local_best, there = torch.zeros_like(x), best, here
        for rank, member in enumerate(member_order(weights)):
            w, distance = self._nearest(members[member], x + delta + local)
            reach = self._reach(w, distance, local, first=rank == 0)
            step = self._unit(local + scale(self.threat.steepest(-w), reach))
            x_adv = x + self.threat.clip(delta + step, x)
            score = expected_accuracy(members, weights, x_adv, y)
            accept = score <= local_best
            local, there = _among(accept, step, local), _among(accept, score, there)
            local_best = torch.where(accept, score, local_best)
        accept = there <= best
        delta = _among(accept, self.threat.clip(delta + local, x), delta)
        return delta, torch.where(accept, there, best), torch.where(accept, there, here)

    def _nearest(self, member: nn.Module, z: Tensor) -> tuple[Tensor, Tensor]:
        """The linearised boundary of the predicted class nearest to z: its normal and distance."""
        z = z.detach().requires_grad_()
        logits = member(z)
        count = min((self.neighbours or logits.shape[-1]), logits.shape[-1] - 1)
        top = logits.topk(count + 1).values
        return nearest_boundary(top[:, :1] - top[:, 1:], z, self.threat)

    def _reach(self, w: Tensor, distance: Tensor, local: Tensor, first: bool) -> Tensor:
        """How far to move along the direction, beta in the paper: [B]."""
        eta = torch.full_like(distance, self.step_size)
        if first:
            return eta
        shift = (_inner(w, local) / (self.threat.dual(w) + GUARD) + distance).abs()
        near = eta / (eta - distance + GUARD) * shift + RHO * self.threat.eps
        return torch.where(distance < eta, near, eta)

    def _unit(self, step: Tensor) -> Tensor:
        return scale(step, self.step_size / (self.threat.size(step) + GUARD))


def arc_suite(threat: Threat, steps: int) -> dict[str, Attack]:
    """Return ARC as the paper runs it, `arc`, and the stronger of two local radii, `arc_two_radii`.

    The radii are eps and eps / 4. The paper takes the first for linf, and for l2 the second, which
    is its step of PGD.

    Args:
        threat: the ball and the bounds; linf or l2.
        steps: iterations over all members.
    """
    radii = (threat.eps, threat.eps / 4)
    large, small = (ARC(threat, steps, radius, early_stop=True) for radius in radii)
    paper, other = (large, small) if threat.p == float("inf") else (small, large)
    return {"arc": paper, "arc_two_radii": Strongest((paper, other))}


def nearest_boundary(gaps: Tensor, z: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """The nearest of the linearised boundaries: its normal [B, …] and its distance [B].

    Args:
        gaps: [B, G] what is zero on each boundary, computed from z.
        z: [B, …] images that require gradients.
        threat: its norm measures distance.
    """
    normal, distance = torch.zeros_like(z), z.new_full((len(z),), torch.inf)
    for rank, gap in enumerate(gaps.unbind(1), 1):
        (w,) = torch.autograd.grad(gap.sum(), z, retain_graph=rank < gaps.shape[1])
        zeta = gap.detach().abs() / (threat.dual(w) + GUARD)
        normal, distance = _among(zeta < distance, w, normal), torch.minimum(zeta, distance)
    return normal, distance


@torch.no_grad()
def expected_accuracy(
    members: Sequence[nn.Module], weights: Tensor, x: Tensor, y: Tensor, check: bool = False
) -> Tensor:
    """L(x): the probability that a member drawn at random is right: [B]."""
    logits = torch.stack([member(x) for member in members])
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
    """ARC on binary linear classifiers sgn(w.x + b) (ARC paper, Algorithm 1), for any p >= 1.

    Consistent (Theorem 5.1): where every member is right and one can be fooled, one is fooled.

    Args:
        weights: [M, D] or [M, C, H, W], the w of each member.
        biases: [M], the b of each member.
        probs: [M] sampling probabilities.
        x: [B, …] points, as large as a w.
        y: [B] labels in {-1, +1}.
        threat: norm and radius; its bounds are not used, as in the paper.

    Returns:
        [B, …] perturbed points.

    Raises:
        ValueError: labels other than -1 and +1, or probs that are not M probabilities.
    """
    if not ((y == 1) | (y == -1)).all():
        raise ValueError(f"labels must be -1 or +1, got {sorted(set(y.tolist()))}")
    flat, sign = x.flatten(1), y.to(x.dtype)
    w, b = weights.flatten(1).to(flat), biases.to(flat)
    alpha = sampling_probabilities(probs, len(w)).to(flat)

    def score(points: Tensor) -> Tensor:
        return ((sign[:, None] * (points @ w.T + b) > 0).to(alpha) * alpha).sum(1)

    delta, best, norms = torch.zeros_like(flat), score(flat), threat.dual(w)
    for rank, i in enumerate(member_order(alpha)):
        direction = -scale(threat.steepest(w[i : i + 1]).expand_as(flat), sign)
        zeta = (flat @ w[i] + b[i]).abs() / norms[i]
        reach = torch.full_like(zeta, threat.eps)
        if rank:
            shift = (sign * (delta @ w[i]) / norms[i] + zeta).abs()
            near = threat.eps / (threat.eps - zeta) * shift + RHO * threat.eps
            reach = torch.where(zeta < threat.eps, near, reach)
        step = delta + scale(direction, reach)
        step = scale(step, threat.eps / threat.size(step).clamp_min(GUARD))
        after = score(flat + step)
        delta, best = _among(after <= best, step, delta), torch.minimum(after, best)
    return (flat + delta).view_as(x)
