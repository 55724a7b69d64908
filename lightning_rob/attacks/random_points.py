"""Attacks without a search: random points of the ball."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat, choose


@dataclass(frozen=True)
class RandomCorners(Attack):
    """The best of some random corners of the ball, without a search."""

    threat: Threat
    tries: int = 10

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        best, lowest = x, x.new_full((len(x),), torch.inf)
        for _ in range(self.tries):
            tried = self.threat.corner(x, generator)
            with torch.no_grad():
                found = defense(tried, generator)
            check_labels(y, found.shape[-1])
            score = found.gather(1, y[:, None])[:, 0].to(lowest)
            wins = score < lowest
            best = choose(wins, tried, best)
            lowest = torch.where(wins, score, lowest)
        return best


@dataclass(frozen=True)
class RandomStart(Attack):
    """One random point of the ball, without a prediction of the defense."""

    threat: Threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.threat.start(x, generator if isinstance(generator, Streams) else None)
