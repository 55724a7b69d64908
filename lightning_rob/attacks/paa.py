"""Attacks on all sub-models of a transformation ensemble, their perturbations aggregated."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.taa import (
    attackable,
    attacked_alone,
    counting,
    transformation_ensemble,
)
from lightning_rob.defenses import Defense, TransformEnsemble
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat

CLOSE = 1e-6  # perturbations in pixel units that differ by rounding only
PATIENCE = 10  # rounds that bring an image neither further nor past another sub-model
FURTHER = 1e-3  # the least progress of a round, as a share of the bound

Aggregate = Literal["MaxP", "AvgP", "MVoteP", "WSumP"]


@dataclass(frozen=True)
class PAA(Attack):
    """Attack all sub-models and aggregate (Liao et al. 2020, Algorithm 3, "PAA").

    The candidates are the members that can be undone or have a gradient. In each round every
    candidate that is left is attacked at the iterate x_adv in its own space, as by `TAA`, and the
    iterate moves by the aggregate of what these attacks add. Candidates that x_adv fooled, the
    iterate before this move, are left out of later rounds for good. As in the algorithm, an image
    is handed in as it stood before the move that

    - would leave the bound on its dissimilarity ||x_adv - x||_2 / ||x||_2; or
    - would come when x_adv fools all candidates left: this move is never made, so an image that
      all of them already get wrong stays as it is.

    The paper bounds the mean dissimilarity of a set of images instead: with `mean_bound` all images
    of a batch stop before the move that would take their mean beyond it. What an image becomes then
    depends on its batch: attack the whole set in one. `max_dissimilarity` still holds for each
    image, as the threat. An image also stops after ten rounds in a row without progress, since
    attacks that take turns at undoing each other would never end.

    Args:
        inner: how each candidate is attacked, around the iterate: its eps is that of one round. If
            one round leaves the bound, an image stays as it is: choose it small.
        aggregate: per pixel, "MaxP" the candidates' value of largest magnitude, "AvgP" their mean,
            "MVoteP" the most frequent one, or "WSumP" their sum by `ranking_weights`, renormalised
            over the candidates left. Ties, up to 1e-6, go to the candidate of the best rank.
        max_dissimilarity: the bound on each image; a black image stays black.
        ranking: candidates by name or index, the most transferable first, see
            `lightning_rob.metrics.transfer_ranking`; those not named follow in their order.
        rounds: at most so many moves; None is as many as it takes.
        project_last: also try the move that leaves the bound, brought back onto it, and keep it
            where it leaves fewer of all members right. The algorithm does not.
        mean_bound: the bound on the batch's mean dissimilarity, which images that have stopped
            count for as well; below `max_dissimilarity`. None is no such bound.

    Raises:
        ValueError: an unknown aggregate, a negative bound, no rounds, a `mean_bound` that the bound
            on each image makes void, or with `project_last`; when called, a ranking of what are no
            candidates, or of one of them twice.
        TypeError: when called on a defense that is no `TransformEnsemble`, or has no candidates.
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
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")
        if self.ranking is not None:
            ranking = [self.ranking] if isinstance(self.ranking, str) else self.ranking
            object.__setattr__(self, "ranking", tuple(ranking))
        if not self.max_dissimilarity >= 0:
            raise ValueError(
                f"max_dissimilarity must not be negative, got {self.max_dissimilarity}"
            )
        if self.mean_bound is None:
            return
        if not 0 <= self.mean_bound < self.max_dissimilarity:
            raise ValueError(
                "mean_bound must be at least 0 and below max_dissimilarity, which bounds each "
                f"image: got {self.mean_bound} and {self.max_dissimilarity}"
            )
        if self.project_last:
            raise ValueError("project_last is for a bound on each image: leave out mean_bound")

    @property
    def batch_dependent(self) -> bool:  # type: ignore[override]
        """Whether the other images of a batch decide when an image stops."""
        return self.mean_bound is not None

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The bound on each image's dissimilarity."""
        return Threat("l2", self.max_dissimilarity, self.inner.threat.bounds, relative=True)

    def rescaled(self, eps: float) -> "PAA":
        """The attack within another `max_dissimilarity`, of which its `mean_bound` keeps its share.

        The inner attack, of one round, stays as it is.
        """
        mean = self.mean_bound
        if mean is not None:
            mean *= eps / self.max_dissimilarity
        return replace(self, max_dissimilarity=eps, mean_bound=mean)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        ensemble = transformation_ensemble(defense, self)
        members = self._candidates(ensemble)
        front, x_adv = Front.begin(x, y, len(members), generator), x.clone()
        for turn in count() if self.rounds is None else range(self.rounds):
            right = _right(ensemble, members, front, turn)
            front, right = front.only(right.any(1)), right[right.any(1)]
            if not len(front.index):
                break
            steps = self._steps(ensemble, members, front, turn)
            moved = self.threat.apply(AGGREGATES[self.aggregate](steps, front.left), front.x_adv)
            inside = self._inside(moved, front.x)
            if self.mean_bound is not None:
                after = x_adv.index_copy(0, front.index[inside], moved[inside])
                if self.threat.distance(after, x).mean() > self.mean_bound:
                    break
            if self.project_last and not inside.all():
                beyond = front.only(~inside)
                x_adv[beyond.index] = self._projected(ensemble, beyond, moved[~inside], turn)
            front.move(moved, right, self.threat, FURTHER * (self.mean_bound or self.threat.eps))
            front = front.only(inside)
            x_adv[front.index] = front.x_adv
            front = front.only(front.idle < PATIENCE)
        return x_adv

    def _candidates(self, ensemble: TransformEnsemble) -> list[int]:
        """The members that are attacked, by their ranks."""
        found = attackable(ensemble)
        first = [ensemble.place(name) for name in self.ranking or ()]
        for rank, i in enumerate(first):
            if i not in found or i in first[:rank]:
                why = "twice" if i in found else "it can neither be undone nor has a gradient"
                raise ValueError(f"ranking must be of the candidates: {ensemble.names[i]}, {why}")
        return first + [i for i in found if i not in first]

    def _steps(
        self, ensemble: TransformEnsemble, members: list[int], front: "Front", turn: int
    ) -> Tensor:
        """What each candidate's attack adds: [N, B, C, H, W], 0 where it is no longer left."""
        steps = front.x.new_zeros(len(members), *front.x.shape)
        for rank, i in enumerate(members):
            rows = front.left[:, rank].nonzero()[:, 0]
            if len(rows):
                part = front.only(rows)
                chance = part.chance(2 * turn, i)
                x_adv = attacked_alone(self.inner, ensemble, i, part.x_adv, part.y, chance)
                steps[rank, rows] = x_adv - part.x_adv
        return steps

    def _inside(self, x_adv: Tensor, x: Tensor) -> Tensor:
        return self.threat.distance(x_adv, x) <= self.max_dissimilarity

    @torch.no_grad()
    def _projected(
        self, ensemble: TransformEnsemble, front: "Front", moved: Tensor, turn: int
    ) -> Tensor:
        """The iterates or, where they leave fewer members right, the moves back on the bound."""
        back, votes = self.threat.project(moved, front.x), counting(ensemble)
        before, after = (
            votes(images, front.chance(2 * turn + 1, -1)).gather(1, front.y[:, None])[:, 0]
            for images in (front.x_adv, back)
        )
        return torch.where((after < before).view(-1, 1, 1, 1), back, front.x_adv)


@dataclass
class Front:
    """The images that are still attacked; one row of each per image.

    Args:
        index: [B] their places in the batch.
        x: [B, C, H, W] as they came.
        y: [B] their labels.
        x_adv: [B, C, H, W] the iterates.
        left: [B, N] which candidates are left.
        furthest: [B] how far an iterate ever was.
        idle: [B] rounds without progress.
        generator: their noise.
    """

    index: Tensor
    x: Tensor
    y: Tensor
    x_adv: Tensor
    left: Tensor
    furthest: Tensor
    idle: Tensor
    generator: Generator

    @classmethod
    def begin(cls, x: Tensor, y: Tensor, candidates: int, generator: Generator) -> "Front":
        """All images, against all candidates."""
        index = torch.arange(len(x), device=x.device)
        left = torch.ones(len(x), candidates, dtype=torch.bool, device=x.device)
        nothing = x.new_zeros(len(x))
        return cls(index, x, y, x, left, nothing, torch.zeros_like(index), generator)

    def only(self, rows: Tensor) -> "Front":
        """Some of the images, by mask or indices."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        own = {k: v[rows] for k, v in values.items() if isinstance(v, Tensor | Streams)}
        return Front(**values | own)

    def move(self, x_adv: Tensor, left: Tensor, threat: Threat, least: float) -> None:
        """Go on from these iterates, against these candidates [B, N]; less far is no progress."""
        reached = threat.distance(x_adv, self.x)
        progress = (reached > self.furthest + least) | (left != self.left).any(1)
        self.furthest = torch.maximum(self.furthest, reached)
        self.idle = torch.where(progress, 0, self.idle + 1)
        self.x_adv, self.left = x_adv, left

    def chance(self, turn: int, member: int) -> Generator:
        """Noise of its own for each member in each turn, whatever the batch."""
        if not isinstance(self.generator, Streams):
            return self.generator
        return self.generator.fold_in(turn).fold_in(member)


@torch.no_grad()
def _right(ensemble: TransformEnsemble, members: list[int], front: Front, turn: int) -> Tensor:
    """Which of the candidates left answer the iterates rightly: [B, N]."""
    right = torch.zeros_like(front.left)
    for rank, i in enumerate(members):
        rows = front.left[:, rank].nonzero()[:, 0]
        if len(rows):
            part = front.only(rows)
            answers = ensemble.one(i)(part.x_adv, part.chance(2 * turn + 1, i))
            right[rows, rank] = answers.gather(1, part.y[:, None])[:, 0] > 0.5
    return right


def ranking_weights(candidates: int) -> Tensor:
    """The weights of WSumP (Liao et al. 2020, eqs. 2-3).

    Args:
        candidates: N.

    Returns:
        [N] float64: softmax of clip(N - i, 0.8 N, N - 2) for the ranks i = 1 … N: the best two
        weigh the same, the others less, and all of them the same for N <= 10.
    """
    places = torch.arange(1, candidates + 1, dtype=torch.float64)
    return (candidates - places).clamp(0.8 * candidates, candidates - 2).softmax(0)


def _weighted(steps: Tensor, left: Tensor, weights: Tensor) -> Tensor:
    shares = weights.to(steps) * left
    shares = (shares / shares.sum(1, keepdim=True)).T
    return (steps * shares.reshape(*shares.shape, 1, 1, 1)).sum(0)


def _mean(steps: Tensor, left: Tensor) -> Tensor:
    return _weighted(steps, left, torch.ones(len(steps)))


def _weighted_sum(steps: Tensor, left: Tensor) -> Tensor:
    return _weighted(steps, left, ranking_weights(len(steps)))


def _largest(steps: Tensor, left: Tensor) -> Tensor:
    size = steps.abs().masked_fill(~left.T[..., None, None, None], -1)
    return _best_ranked(steps, size >= size.amax(0) - CLOSE)


def _most_frequent(steps: Tensor, left: Tensor) -> Tensor:
    voters = left.T[..., None, None, None]
    votes = torch.stack([(((steps - step).abs() <= CLOSE) & voters).sum(0) for step in steps])
    votes = votes.masked_fill(~voters, 0)
    return _best_ranked(steps, votes == votes.amax(0))


def _best_ranked(steps: Tensor, wins: Tensor) -> Tensor:
    """Per pixel the first of the values [N, B, C, H, W] that win."""
    return steps.gather(0, wins.int().argmax(0, keepdim=True))[0]


AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "MaxP": _largest,
    "AvgP": _mean,
    "MVoteP": _most_frequent,
    "WSumP": _weighted_sum,
}
