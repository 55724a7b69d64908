"""Attacks on transformation ensembles: on one sub-model (TAA), or on all of them (PAA)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.attacks.members import Strongest
from lightning_rob.defenses import Defense, Single, TransformEnsemble, is_transform_ensemble
from lightning_rob.defenses.network import Preprocessed
from lightning_rob.defenses.rejection import rewrapped, unwrapped
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Norm, Threat, choose, norm_order

CLOSE = 1e-6  # difference of perturbations, in pixel units, that is rounding only
PATIENCE = 10  # rounds in a row without progress after which an image stops
FURTHER = 1e-3  # distance of a round that counts as progress, as a share of the bound

Aggregate = Literal["MaxP", "AvgP", "MVoteP", "WSumP"]


@dataclass(frozen=True)
class TAA(Attack):
    """Attack one sub-model, the target; the perturbation transfers to others (Liao et al. 2020).

    x_adv = x + undo(inner(t(x)) - t(x)): the inner attack sees the target's network and images as
    this network sees them, and the perturbation found is carried back. Pixels that a shift has lost
    keep their value, so ball and bounds are those of the inner attack. Perturbations of pixels that
    a shift has filled in cannot be carried back, and are hidden from the network. A transformation
    that cannot be undone but has a gradient is attacked through.

    Args:
        inner: the attack on the target; its threat is the threat of TAA.
        target: the target by its transformation's name or its index. None attacks each candidate
            member in turn and keeps, per image, the perturbation that leaves the fewest members
            correct, the earlier target on ties.
    """

    made_for: ClassVar[tuple[str, ...]] = ("transformed",)
    knowledge: ClassVar[str] = "one sub-model, in its own space, and the predictions of the others"
    inner: Attack
    target: str | int | None = None

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return self.inner.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        ensemble = transformation_ensemble(defense, self)
        if self.target is not None:
            place = ensemble.place(self.target)
            return attack_member(self.inner, ensemble, place, x, y, generator)
        each = Strongest(tuple(TAA(self.inner, i) for i in attackable(ensemble)))
        return each.perturb(with_vote_counts(ensemble), x, y, generator)


@dataclass(frozen=True)
class OnDifferentiable(AttackDecorator):
    """Attack the members that have a gradient, all at once and through their transformations.

    Args:
        straight_through: also attack the other members, behind transformations with the gradient of
            the identity.
    """

    straight_through: bool = False
    made_for: ClassVar[tuple[str, ...]] = ("transformed",)
    knowledge: ClassVar[str] = "the sub-models that have a gradient"

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        return super().strategies(self._part(defense))

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.attack.perturb(self._part(defense), x, y, generator)

    def _part(self, defense: Defense) -> Defense:
        ensemble = transformation_ensemble(unwrapped(defense), self)
        kinds = enumerate(ensemble.transforms.values())
        chosen = [i for i, kind in kinds if kind.differentiable or self.straight_through]
        if not chosen:
            names = ", ".join(ensemble.names)
            raise TypeError(f"no member has a gradient, of {names}: use TAA, or Square without one")
        part = ensemble.part(chosen)
        part.straight_through = self.straight_through
        return rewrapped(part, defense)


@dataclass(frozen=True)
class PAA(Attack):
    """Attack all sub-models and aggregate (Liao et al. 2020, Algorithm 3, "PAA").

    The candidates are the members that can be undone or have a gradient. In each round every
    remaining candidate is attacked at the iterate in its own space, as by `TAA`, and the iterate
    moves by the aggregate of the perturbations found. Candidates that the iterate fools before this
    move are left out of all later rounds. An image stops before a move that would leave the bound
    on its dissimilarity ||x_adv - x||_2 / ||x||_2, when its iterate fools all candidates (one that
    all misclassify from the start stays unchanged), and after ten rounds in a row without progress,
    for attacks may take turns at undoing each other.

    Args:
        inner: the attack on each candidate, around the iterate: its eps is that of one round. If
            one round leaves the bound, an image stays unchanged: choose it small.
        aggregate: per pixel, "MaxP" the candidates' value of largest magnitude, "AvgP" their mean,
            "MVoteP" the most frequent one, or "WSumP" their sum by `ranking_weights`, renormalised
            over the remaining candidates. Ties, up to 1e-6, go to the candidate of the best rank.
        max_dissimilarity: the bound on each image; a black image stays black.
        ranking: candidates by name or index, the most transferable first, see
            `lightning_rob.metrics.transfer_ranking`; unnamed candidates follow in their order.
        rounds: the largest number of moves; None is unlimited.
        project_last: also try the move that leaves the bound, projected back onto it, and keep it
            where it leaves fewer of all members correct. The algorithm does not.
        mean_bound: the paper's bound on the mean dissimilarity of a set, below `max_dissimilarity`:
            all images of a batch stop before the move that would leave it. Attack the whole set in
            one batch. None is no such bound.
    """

    made_for: ClassVar[tuple[str, ...]] = ("transformed",)
    inner: Attack
    aggregate: Aggregate = "MaxP"
    max_dissimilarity: float = 0.3
    ranking: tuple[str | int, ...] | None = None
    rounds: int | None = None
    project_last: bool = False
    mean_bound: float | None = None

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise ValueError(f"aggregate must be of {list(AGGREGATES)}, got {self.aggregate!r}")
        at_least(1, rounds=self.rounds)
        if self.ranking is not None:
            ranking = [self.ranking] if isinstance(self.ranking, str) else self.ranking
            object.__setattr__(self, "ranking", tuple(ranking))
        at_least(0, max_dissimilarity=self.max_dissimilarity)
        if self.mean_bound is not None and self.project_last:
            raise ValueError("project_last is for a bound on each image: leave out mean_bound")

    @property
    def batch_dependent(self) -> bool:  # type: ignore[override]
        return self.mean_bound is not None

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        return Threat("l2", self.max_dissimilarity, self.inner.threat.bounds, relative=True)

    def rescaled(self, eps: float, norm: Norm | None = None) -> "PAA":
        """Return the attack for another `max_dissimilarity` (l2); `mean_bound` scales with it."""
        if norm is not None and norm_order(norm) != 2:
            raise ValueError(f"PAA bounds the l2 dissimilarity: its norm cannot be {norm!r}")
        # The inner attack, of one round, stays the same.
        mean = self.mean_bound and self.mean_bound * (eps / self.max_dissimilarity)
        return replace(self, max_dissimilarity=eps, mean_bound=mean)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        ensemble = transformation_ensemble(defense, self)
        found, members = attackable(ensemble), [ensemble.place(name) for name in self.ranking or ()]
        members += [i for i in found if i not in members]
        x_adv, index = x.clone(), positions(x)
        remaining = torch.ones(len(x), len(members), dtype=torch.bool, device=x.device)
        start = (x, remaining, x.new_zeros(len(x)), torch.zeros_like(index))
        active = Iterates(index, x, y, generator, *start)
        for turn in count() if self.rounds is None else range(self.rounds):
            # Candidates that the iterate fools before this move are left out of all later rounds.
            correct = active.still_correct(ensemble, members, turn)
            active, correct = active.select(correct.any(1)), correct[correct.any(1)]
            if not len(active):
                break
            # The perturbations of each candidate, zero where it is fooled.
            added = active.x.new_zeros(len(members), *active.x.shape)
            for rank, member, rows, part in active.against(members):
                # Even numbers are of attacks, odd ones of predictions, whose draws are others.
                noise = part.noise(2 * turn, member)
                tried = attack_member(self.inner, ensemble, member, part.x_adv, part.y, noise)
                added[rank, rows] = tried - part.x_adv
            step = AGGREGATES[self.aggregate](added, active.remaining)
            moved = self.threat.apply(step, active.x_adv)
            inside = self.threat.distance(moved, active.x) <= self.max_dissimilarity
            if self.mean_bound is not None:
                # The mean is over all images of the batch, also those that have stopped.
                after = x_adv.index_copy(0, active.index[inside], moved[inside])
                if self.threat.distance(after, x).mean() > self.mean_bound:
                    break
            if self.project_last and not inside.all():
                last = active.select(~inside)
                x_adv[last.index] = self._projected(ensemble, last, moved[~inside], turn)
            min_progress = FURTHER * (self.mean_bound or self.threat.eps)
            active.move(moved, correct, self.threat, min_progress)
            active = active.select(inside)
            x_adv[active.index] = active.x_adv
            active = active.select(active.stalled < PATIENCE)
        return x_adv

    @torch.no_grad()
    def _projected(
        self, ensemble: TransformEnsemble, active: "Iterates", moved: Tensor, turn: int
    ) -> Tensor:
        """Return the moved images on the bound where they fool more members, else the iterates."""
        projected, votes = self.threat.project(moved, active.x), with_vote_counts(ensemble)
        before, after = (
            votes(images, active.noise(2 * turn + 1, -1)).gather(1, active.y[:, None])[:, 0]
            for images in (active.x_adv, projected)
        )
        return choose(after < before, projected, active.x_adv)


@dataclass
class Iterates(ActiveBatch):
    """The iterates of the images that are still attacked."""

    x_adv: Tensor  # [b, C, H, W] the current iterates
    remaining: Tensor  # [b, N] the candidates that are not fooled yet
    max_distance: Tensor  # [b] the largest distance of an iterate so far
    stalled: Tensor  # [b] rounds in a row without progress

    def against(self, members: list[int]) -> "Iterator[tuple[int, int, Tensor, Iterates]]":
        """Yield the rank of each candidate, the member, and the rows and images left for it."""
        for rank, member in enumerate(members):
            rows = self.remaining[:, rank].nonzero()[:, 0]
            if len(rows):
                yield rank, member, rows, self.select(rows)

    @torch.no_grad()
    def still_correct(self, ensemble: TransformEnsemble, members: list[int], turn: int) -> Tensor:
        """Return the remaining candidates that predict the iterates correctly: [b, N]."""
        correct = torch.zeros_like(self.remaining)
        for rank, member, rows, part in self.against(members):
            predictions = ensemble.one(member)(part.x_adv, part.noise(2 * turn + 1, member))
            correct[rows, rank] = predictions.gather(1, part.y[:, None])[:, 0] > 0.5
        return correct

    def move(self, x_adv: Tensor, remaining: Tensor, threat: Threat, min_progress: float) -> None:
        """Continue from these iterates, against these candidates [b, N]."""
        distance = threat.distance(x_adv, self.x)
        fooled_more = (remaining != self.remaining).any(1)
        # attacks that undo each other in turn neither move it further nor fool more candidates
        progress = (distance > self.max_distance + min_progress) | fooled_more
        self.max_distance = torch.maximum(self.max_distance, distance)
        self.stalled = torch.where(progress, 0, self.stalled + 1)
        self.x_adv, self.remaining = x_adv, remaining

    def noise(self, turn: int, member: int) -> Generator:
        """Return a generator for a member in a turn, which does not depend on the batch."""
        return derived(derived(self.generator, turn), member)


def transformation_ensemble(defense: Defense, attack: Attack) -> TransformEnsemble:
    """Return the defense; TypeError if it is no `TransformEnsemble`, for which the attack is."""
    if not is_transform_ensemble(defense):
        name, kind = type(attack).__name__, type(defense).__name__
        raise TypeError(f"{name} is an attack on a TransformEnsemble, got {kind}: use PGD")
    return defense


def attackable(ensemble: TransformEnsemble) -> list[int]:
    """Return the members whose transformation can be undone or has a gradient."""
    kinds = ensemble.transforms.values()
    found = [i for i, kind in enumerate(kinds) if kind.reversible or kind.differentiable]
    if not found:
        raise TypeError(
            f"none of {', '.join(ensemble.names)} can be undone or has a gradient: attack this "
            "ensemble with Square, or with OnDifferentiable(PGD(…), straight_through=True)"
        )
    return found


def attack_member(
    inner: Attack,
    ensemble: TransformEnsemble,
    member: int,
    x: Tensor,
    y: Tensor,
    generator: Generator,
) -> Tensor:
    """Attack a member in its own space, inside `attacking`, and carry the perturbation back."""
    transform = ensemble.transform(member)
    if not transform.reversible:
        return inner.perturb(ensemble.one(member), x, y, generator)
    with torch.no_grad():
        transformed = transform(x)

    def seen(z: Tensor) -> Tensor:  # without what cannot be carried back
        return transform(transform.undo(z)) if transform.differentiable else z

    target = Single(Preprocessed(seen, ensemble.members[member]))
    x_adv = inner.perturb(target, transformed.clone(), y, generator)
    # The difference is undone, not the image: pixels that a shift has lost keep their value.
    return inner.threat.apply(transform.undo(x_adv.detach() - transformed), x)


def with_vote_counts(ensemble: TransformEnsemble) -> TransformEnsemble:
    """Return the ensemble with a rule that counts the members' votes for each class: [B, K]."""
    view = ensemble.part(range(len(ensemble.members)))
    # Weights of one give whole numbers: ties are exact.
    view.rule = lambda logits, weights: random_member(logits, torch.ones_like(weights))
    return view


def ranking_weights(candidates: int) -> Tensor:
    """Compute the weights [N] of WSumP for N candidates, in float64 (Liao et al. 2020, eqs. 2-3).

    They are the softmax of clip(N - i, 0.8 N, N - 2) for the ranks i = 1 … N: the best two have the
    same weight, the others less; for N <= 10 all have the same.
    """
    ranks = torch.arange(1, candidates + 1, dtype=torch.float64)
    return (candidates - ranks).clamp(0.8 * candidates, candidates - 2).softmax(0)


def _weighted(added: Tensor, remaining: Tensor, weights: Tensor) -> Tensor:
    # Renormalised over the candidates that are left.
    shares = weights.to(added) * remaining
    shares = (shares / shares.sum(1, keepdim=True)).T
    return (added * shares.reshape(*shares.shape, 1, 1, 1)).sum(0)


def _largest(added: Tensor, remaining: Tensor) -> Tensor:
    # A candidate that is fooled never wins: -1 is below every magnitude.
    size = added.abs().masked_fill(~remaining.T[..., None, None, None], -1)
    return _best_ranked(added, size >= size.amax(0) - CLOSE)


def _most_frequent(added: Tensor, remaining: Tensor) -> Tensor:
    voters = remaining.T[..., None, None, None]
    votes = torch.stack([(((added - value).abs() <= CLOSE) & voters).sum(0) for value in added])
    votes = votes.masked_fill(~voters, 0)
    return _best_ranked(added, votes == votes.amax(0))


def _best_ranked(added: Tensor, wins: Tensor) -> Tensor:
    """Return per pixel the first of the values [N, b, C, H, W] that win."""
    return added.gather(0, wins.int().argmax(0, keepdim=True))[0]


# Each maps perturbations [N, b, C, H, W] and the remaining candidates [b, N] to [b, C, H, W].
AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "MaxP": _largest,
    "AvgP": lambda added, remaining: _weighted(added, remaining, torch.ones(len(added))),
    "MVoteP": _most_frequent,
    "WSumP": lambda added, remaining: _weighted(added, remaining, ranking_weights(len(added))),
}
