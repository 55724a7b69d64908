"""Decisions with one outcome an image, as of a detector or a router, held while logits are climbed.

A forward pass that takes one of several ways for an image has no slope towards the other ways, and
the slope of the way that it takes does not say where it is left. Held at an outcome, the pass is
smooth, and what is left to do is to make the defense decide so.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks.discrete import COMPARES, chosen_along, differentiated, hidden_source
from lightning_rob.defenses.per_image import PerImageValues

MOST = 10.0  # of the usual margin and lead, beyond which neither counts
COLUMNS = 8  # thresholds of an image that are compared at once
CHOOSES = ("argmax", "argmin", "max", "min", "topk")
ASKS = COMPARES | {"signbit"}
STEPS = {"sign": -1.0, "sgn": -1.0, "heaviside": 0.0}  # their value below zero; above it is 1
# Where the middle of what gives a whole number is, above it.
ROUNDS = {"round": 0.0, "floor": 0.5, "ceil": -0.5, "int": 0.5, "long": 0.5}
LEVELS = 8  # whole numbers from 0, of which one is given


class Decisions:
    """The decisions of a forward pass on B images, in their order, as if they had no slope.

    Args:
        images: B.
        outcomes: the outcome [B] of each of the first decisions, which is held; others are taken,
            and those at None left as they are.
        each: how many of the last outcomes are those of a loop over the images.
    """

    def __init__(self, images: int, outcomes: Sequence[Tensor | None] = (), each: int = 0) -> None:
        self.images, self.outcomes, self.each = images, outcomes, each
        self.together: list[Tensor] = []  # [B, n] of the n outcomes, of which the largest is taken
        self.alone: list[Tensor] = []  # [2] of no and yes, one image after the other
        self._used: set[int] = set()

    @property
    def each_alone(self) -> int:
        """Decisions of each image that a loop over the images takes."""
        each, more = divmod(len(self.alone), self.images)
        return 0 if more else each

    @property
    def scores(self) -> list[Tensor]:
        """Scores [B, n] of the n outcomes of each decision, those of a loop behind the others."""
        each = self.each_alone
        return [*self.together, *(torch.stack(self.alone[at::each]) for at in range(each))]

    @property
    def used(self) -> set[int]:
        """Places of the decisions that are more than a value's place."""
        many, each = len(self.together), self.each_alone
        alone = {many + (-1 - at) % each for at in self._used if at < 0} if each else set()
        return alone | {at for at in self._used if at >= 0}

    def held(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Return what an operation gave, or where it decides what it gives if it decides so."""
        inner = (value for value in args if isinstance(value, list | tuple))
        for value in chain(args, kwargs.values(), *inner):
            if isinstance(value, Tensor):
                self._used |= vars(value).get("decisions", set())
        if isinstance(out, Tensor) and out.numel() == 1 and name in ASKS and not out.dim():
            return self._held_alone(out)
        index = out[1] if isinstance(out, tuple) and len(out) == 2 else out
        if not args or not isinstance(index, Tensor) or not index.dim():
            return out
        if len(index) != self.images or not 0 < index.numel() <= COLUMNS * self.images:
            return out
        if (scores := self._scores(name, args, kwargs, index)) is None:
            return out
        places = range(len(self.together), len(self.together) + len(scores))
        self.together += scores
        least = STEPS.get(name)
        own = (index if least is None else index > 0).long().view(self.images, -1).unbind(1)
        known = len(self.outcomes) - self.each
        given = [self.outcomes[at] if at < known else None for at in places]
        ways = [mine if way is None else way for mine, way in zip(own, given, strict=True)]
        taken = torch.stack(ways, 1)
        if least is not None:
            taken = torch.where(taken > 0, 1.0, least)
        taken = taken.to(index.dtype).view_as(index)
        vars(taken)["decisions"] = {*places}
        if index is out:
            return taken
        return type(out)((args[0].gather(1, ways[0][:, None]).view_as(out[0]), taken))

    def _held_alone(self, out: Tensor) -> Tensor:
        """Return a comparison of one image, as in a loop over the images, or what is held."""
        if (source := hidden_source(out)) is None or not source.requires_grad:
            return out
        at, way = len(self.alone), None
        self.alone.append(torch.stack([-source, source]))
        if self.each and at < self.each * self.images:
            image, place = divmod(at, self.each)
            way = self.outcomes[len(self.outcomes) - self.each + place]
        taken = out.clone() if way is None else way[image] > 0
        vars(taken)["decisions"] = {-1 - at}
        return taken

    def _scores(
        self, name: str, args: Any, kwargs: dict[str, Any], index: Tensor
    ) -> list[Tensor] | None:
        first = args[0]
        levels = self._levels(name, args, kwargs, index)
        if levels is not None:
            return [levels]
        if name in ASKS or name in STEPS:
            source = hidden_source(index) if name in ASKS else first
            if source is None or source.numel() != index.numel() or not source.requires_grad:
                return None
            columns = source.reshape(self.images, -1).unbind(1)
            return [torch.stack([-one, one], 1) for one in columns]
        rows = name in CHOOSES and differentiated(first) and not index.is_floating_point()
        if not rows or first.dim() != 2 or len(first) != self.images or first.shape[1] < 2:
            return None
        dim, largest = chosen_along(name, args, kwargs)
        if dim not in (None, 1, -1) or index.numel() != self.images:
            return None
        return [first if largest else -first]

    def _levels(self, name: str, args: Any, kwargs: dict[str, Any], index: Tensor) -> Any:
        """Return by how much a value of each image is inside each level of a rounding; or None."""
        if not differentiated(args[0]) or index.numel() != self.images or kwargs:
            return None
        value, index = args[0].reshape(-1, 1), index.detach()
        if name == "bucketize":
            ends = value.detach().abs().max() + 1
            bounds = torch.cat([-ends[None], args[1].to(value), ends[None]])
            return torch.minimum(value - bounds[:-1], bounds[1:] - value)
        if name not in ROUNDS or bool((index < 0).any() | (index >= LEVELS).any()):
            return None
        middle = torch.arange(LEVELS).to(value) + ROUNDS[name]
        return 0.5 - (value - middle).abs()


class HeldOutcomes(nn.Module):
    """The outcome of each decision that is held for the images of a batch, and their labels."""

    def __init__(self, found: Decisions, ranks: Sequence[int], y: Tensor) -> None:
        super().__init__()
        scores, self.each = found.scores, found.each_alone
        chosen = [
            of.detach().topk(min(max(rank, 0) + 1, of.shape[1])).indices[:, -1]
            for of, rank in zip(scores, ranks, strict=False)
        ]
        self.ranks = ranks
        self.values = PerImageValues(torch.stack([y, *chosen], 1))
        self.sizes: list[Tensor] = []  # of the margin and of each lead, at the images

    @property
    def outcomes(self) -> list[Tensor | None]:
        """The outcome [B] of each decision, None for those that are not held."""
        ways = self.values()[:, 1:].unbind(1)
        return [way if rank >= 0 else None for way, rank in zip(ways, self.ranks, strict=False)]

    def _leads(self, scores: Sequence[Tensor]) -> Iterable[Tensor]:
        """Yield by how much the score of each held outcome leads all others [B]."""
        for of, way in zip(scores, self.outcomes, strict=False):
            if way is not None:
                index = way[:, None]
                others = of.scatter(1, index, -torch.inf).amax(1)
                yield of.gather(1, index)[:, 0] - others

    def bounded(self, logits: Tensor, scores: Sequence[Tensor]) -> Tensor:
        """Return logits [n, B, K] whose margin is at most the smallest lead, at least in float32.

        Both are in units of their median at the images that are attacked.
        """
        kind = torch.promote_types(logits.dtype, torch.float32)
        logits, leads = logits.to(kind), [lead.to(kind) for lead in self._leads(scores)]
        index = self.values()[:, 0].expand(logits.shape[:-1])[..., None]
        label = logits.gather(-1, index)
        if not leads:  # as with other draws than were looked at
            return logits
        top = logits.scatter(-1, index, -torch.inf).amax(-1, keepdim=True)
        if not self.sizes:
            self.sizes = [_usual(one) for one in (top - label, *leads)]
        size, *sizes = self.sizes
        label = label.maximum((top - MOST * size).detach())  # it may be masked by -inf
        ratios = [lead / own for lead, own in zip(leads, sizes, strict=False)]
        least = size * torch.stack(ratios).amin(0).clamp_max(MOST)
        return logits.minimum(label + least[:, None]).scatter(-1, index, label)


def _usual(values: Tensor) -> Tensor:
    """Return the median size of values of which some may be infinite."""
    sizes = values.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return sizes.median().clamp_min(1e-9) if len(sizes) else values.new_ones(())
