"""Decisions with one outcome an image, as of a detector or a router, held while logits are climbed.

A forward pass that takes one of several ways for an image has no slope towards the other ways, and
the slope of the way that it takes does not say where it is left. Held at an outcome, the pass is
smooth, and what is left to do is to make the defense decide so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks.discrete import COMPARES, differentiated, hidden_source
from lightning_rob.defenses.per_image import PerImageValues

MOST = 10.0  # of the usual margin and lead, beyond which neither counts
CHOOSES = ("argmax", "argmin", "max", "min", "topk")


class Decisions:
    """The decisions of a forward pass on B images, in their order, as if they had no slope.

    Args:
        images: B.
        outcomes: the outcome [B] of each of the first decisions, which is held; others are taken.
    """

    def __init__(self, images: int, outcomes: Sequence[Tensor] = ()) -> None:
        self.images, self.outcomes = images, outcomes
        self.scores: list[Tensor] = []  # [B, n] of the n outcomes, of which the largest is taken

    def held(self, name: str, args: Any, out: Any) -> Any:
        """Return what an operation gave, or where it decides what it gives if it decides so."""
        index = out[1] if isinstance(out, tuple) and len(out) == 2 else out
        if not args or not isinstance(index, Tensor) or index.numel() != self.images:
            return out
        if (scores := self._scores(name, args[0], index)) is None:
            return out
        place = len(self.scores)
        self.scores.append(scores)
        outcome = self.outcomes[place] if place < len(self.outcomes) else index.flatten().long()
        taken = outcome.to(index.dtype).view_as(index)
        if index is out:
            return taken
        return type(out)((args[0].gather(1, outcome[:, None]).view_as(out[0]), taken))

    def _scores(self, name: str, first: Any, index: Tensor) -> Tensor | None:
        if name in COMPARES:
            source = hidden_source(index)
            if source is None or source.numel() != self.images:
                return None
            return torch.stack([-source.flatten(), source.flatten()], 1)
        rows = name in CHOOSES and differentiated(first) and not index.is_floating_point()
        if not rows or first.dim() != 2 or len(first) != self.images or first.shape[1] < 2:
            return None
        return -first if name in ("argmin", "min") else first


class HeldOutcomes(nn.Module):
    """The outcome of each decision that is held for the images of a batch, and their labels."""

    def __init__(self, scores: Sequence[Tensor], ranks: Sequence[int], y: Tensor) -> None:
        super().__init__()
        ways = [
            of.detach().topk(rank + 1).indices[:, rank]
            for of, rank in zip(scores, ranks, strict=False)
        ]
        self.ways = nn.ModuleList(map(PerImageValues, ways))
        self.labels = PerImageValues(y)
        self.sizes: list[Tensor] = []  # of the margin and of each lead, at the images

    @property
    def outcomes(self) -> list[Tensor]:
        """The outcome [B] of each decision."""
        return [values() for values in self.ways]

    def _leads(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return by how much the score of each held outcome leads all others [B]."""
        leads = []
        for of, way in zip(scores, self.outcomes, strict=False):
            index = way[:, None]
            others = of.scatter(1, index, -torch.inf).amax(1)
            leads.append(of.gather(1, index)[:, 0] - others)
        return leads

    def bounded(self, logits: Tensor, scores: Sequence[Tensor]) -> Tensor:
        """Return logits [n, B, K] whose margin is at most the smallest lead.

        Both are in units of their median at the images that are attacked.
        """
        index = self.labels().expand(logits.shape[:-1])[..., None]
        label, leads = logits.gather(-1, index), self._leads(scores)
        if not leads:  # as with other draws than were looked at
            return logits
        top = logits.scatter(-1, index, -torch.inf).amax(-1, keepdim=True)
        if not self.sizes:
            self.sizes = [_usual(one) for one in (top - label, *leads)]
        size, *sizes = self.sizes
        label = label.maximum((top - MOST * size).detach())  # it may be masked by -inf
        ratios = [lead / own for lead, own in zip(leads, sizes, strict=False)]
        least = size * torch.stack(ratios).amin(0).clamp_max(MOST)
        return logits.minimum(label + least[:, None].to(logits)).scatter(-1, index, label)


def _usual(values: Tensor) -> Tensor:
    """Return the median size of values of which some may be infinite."""
    sizes = values.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return sizes.median().clamp_min(1e-9) if len(sizes) else values.new_ones(())
