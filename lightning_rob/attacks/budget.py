"""Passes: how many an attack costs, and how many of its steps fit into a number of them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to

A = TypeVar("A", bound="Counted")


class PassCount:
    """Numbers of networks and of classes, on which the passes of an attack depend.

    A pass is one forward or one backward pass of one image through one network: a step of PGD on
    an ensemble of M members costs 2 M, one of EoT on S draws 2 S.
    """

    def __init__(self, defense: Defense, x: Tensor, classes: int | None = None) -> None:
        self.defense = defense
        self.x = x
        self.networks = len(defense.weights)  # for a prediction: its members, or its draws
        self.asked = 0  # passes of the first image before the attack
        self._classes = classes  # None: the first image is predicted to find out
        self._logits = cache(self._ask)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self._classes or self._logits(None).shape[-1]

    def drawn(self, draws: int | None) -> int:
        """Return the networks that run for one image where a random defense is drawn so often."""
        if draws is None or type(self.defense).sample_logits is Defense.sample_logits:
            return self.networks * (draws or 1)
        return self._logits(draws).shape[0]

    @torch.no_grad()
    def _ask(self, draws: int | None) -> Tensor:
        generator = torch.Generator(self.x.device).manual_seed(0)
        first = torch.zeros(1, dtype=torch.long, device=self.x.device)
        try:
            with restricted_to(self.defense, first):
                logits, _ = self.defense.sample_logits(self.x[:1], generator, draws)
        except ValueError:  # a network that normalizes by its batch refuses one image
            logits, _ = self.defense.sample_logits(self.x, generator, draws)
        self.asked += len(logits)
        return logits


class Counted:
    """An attack whose passes may be known before it runs, so that a budget decides its steps."""

    effort: ClassVar[str] = "steps"  # the field that a budget sets

    def cost(self, count: PassCount) -> int:
        """Return the largest number of passes that an image costs; fewer where it leaves early."""
        raise TypeError(
            f"{type(self).__name__} has no number of passes that is known before it runs: put "
            "Budgeted around an attack inside it, if it has one"
        )

    def least(self, count: PassCount) -> int:
        """Return the passes that an image costs with the fewest steps."""
        return self.with_effort(1).cost(count)

    def within(self, passes: int, count: PassCount) -> Self:
        """Return the attack with the most steps that cost an image no more than these passes."""
        passes = self.affordable(passes, count)
        efforts = range(1, passes + 1)
        cost = lambda effort: self.with_effort(effort).cost(count)  # noqa: E731
        return self.with_effort(bisect_right(efforts, passes, key=cost))

    def affordable(self, passes: int, count: PassCount) -> int:
        """Return the passes that are left for the attack, after those for the number of classes."""
        self.cost(count)  # an error where it is not known
        least = self.least(count) + count.asked
        if passes < least:
            raise ValueError(
                f"{type(self).__name__} needs {least} passes or more here, got {passes}"
            )
        return passes - count.asked

    def with_effort(self, effort: int) -> Self:
        """Return the attack with this number of steps."""
        return replace(self, **{self.effort: effort})  # type: ignore[type-var]


def shared(attacks: Sequence[A], passes: int, count: PassCount) -> list[A]:
    """Return the attacks with steps that together cost these passes, in the same proportions."""
    least, costs = [a.least(count) for a in attacks], [a.cost(count) for a in attacks]
    free = passes - sum(least)
    shares = [low + free * cost // sum(costs) for low, cost in zip(least, costs, strict=True)]
    return [a.within(share + count.asked, count) for a, share in zip(attacks, shares, strict=True)]
