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
STEPS = {"sign": -1.0, "sgn": -1.0, "heaviside": 0.0}  # their value below zero; above it is 1


class Decisions:
    """The decisions of a forward pass on B images, in their order, as if they had no slope.

    Args:
        images: B.
        outcomes: the outcome [B] of each of the first decisions, which is held; others are taken,
            and those at None left as they are.
    """

    def __init__(self, images: int, outcomes: Sequence[Tensor | None] = ()) -> None:
        self.images, self.outcomes = images, outcomes
        self.scores: list[Tensor] = []  # [B, n] of the n outcomes, of which the largest is taken
        self.used: set[int] = set()  # those that are more than a value's place

    def held(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Return what an operation gave, or where it decides what it gives if it decides so."""
        inner = (value for value in args if isinstance(value, list | tuple))
        for value in chain(args, kwargs.values(), *inner):
            if isinstance(value, Tensor):
                self.used |= vars(value).get("decisions", set())
        index = out[1] if isinstance(out, tuple) and len(out) == 2 else out
        if not args or not isinstance(index, Tensor) or not index.dim():
            return out
        if len(index) != self.images or not 0 < index.numel() <= COLUMNS * self.images:
            return out
        if (scores := self._scores(name, args, kwargs, index)) is None:
            return out
        places = range(len(self.scores), len(self.scores) + len(scores))
        self.scores += scores
        least = STEPS.get(name)
        own = (index if least is None else index > 0).long().view(self.images, -1).unbind(1)
        given = [self.outcomes[at] if at < len(self.outcomes) else None for at in places]
        ways = [mine if way is None else way for mine, way in zip(own, given, strict=True)]
        taken = torch.stack(ways, 1)
        if least is not None:
            taken = torch.where(taken > 0, 1.0, least)
        taken = taken.to(index.dtype).view_as(index)
        vars(taken)["decisions"] = {*places}
        if index is out:
            return taken
        return type(out)((args[0].gather(1, ways[0][:, None]).view_as(out[0]), taken))

    def _scores(
        self, name: str, args: Any, kwargs: dict[str, Any], index: Tensor
    ) -> list[Tensor] | None:
        first = args[0]
        if name in COMPARES or name in STEPS:
            source = hidden_source(index) if name in COMPARES else first
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


class HeldOutcomes(nn.Module):
    """The outcome of each decision that is held for the images of a batch, and their labels."""

    def __init__(self, scores: Sequence[Tensor], ranks: Sequence[int], y: Tensor) -> None:
        super().__init__()
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
