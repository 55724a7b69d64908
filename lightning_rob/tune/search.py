"""Where to try next, and when to stop: pure functions of the trials so far."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound

from lightning_rob.randomness import derive_seed
from lightning_rob.tune.options import Budget
from lightning_rob.tune.space import Bound, Point

KAPPA = 2.576  # the library's default, and that of Ray Tune when the authors used it
Observation = tuple[Point, float | None]  # None: it failed


@dataclass(frozen=True)
class Search:
    """Proposes points: the recipe's own, the diagonal, some at random, then the optimiser's.

    Each proposal has a random stream of its own, so it depends on the seed, its number and the
    trials so far, and not on whether they were made in one go.

    Args:
        variables: key -> bounds.
        own: the recipe's values, trial 0.
        budget: how many of which.
        seed: of all chance.
        earlier: what another study found; it stands for as many trials at random.
    """

    variables: Mapping[str, Bound]
    own: Point
    budget: Budget
    seed: int
    earlier: Sequence[tuple[Point, float]] = ()

    @property
    def initial(self) -> int:
        """The number of trials before the optimiser proposes."""
        at_random = max(self.budget.random - len(self.earlier), 0)
        return 1 + self.budget.diagonal + at_random

    def propose(
        self, number: int, trials: Sequence[Observation], pending: Sequence[Point] = ()
    ) -> Point:
        """The values of a trial.

        Args:
            number: of the trial.
            trials: those that ended.
            pending: points that are being tried; for now they count as average.
        """
        if number == 0:
            return self.own
        if number <= self.budget.diagonal:
            return self._diagonal((number - 1) / self.budget.diagonal)
        optimizer = self._optimizer(derive_seed(self.seed, number) % 2**32)
        if number < self.initial:
            return self._typed(optimizer.random_sample(1)[0])
        for point, objective in self._known(trials, pending):
            optimizer.register(point, objective)
        return self._typed(optimizer.suggest())

    def _diagonal(self, share: float) -> Point:
        ends = {key: bound[:2] for key, bound in self.variables.items()}
        return self._typed({k: low + (high - low) * share for k, (low, high) in ends.items()})

    def _optimizer(self, seed: int) -> BayesianOptimization:
        method = UpperConfidenceBound(KAPPA)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Non-float parameters are experimental")
            return BayesianOptimization(None, dict(self.variables), method, None, seed, verbose=0)

    def _typed(self, point: Mapping[str, Any]) -> Point:
        whole = {key for key, bound in self.variables.items() if len(bound) == 3}
        return {k: round(point[k]) if k in whole else float(point[k]) for k in self.variables}

    def _known(
        self, trials: Sequence[Observation], pending: Sequence[Point]
    ) -> list[tuple[Point, float]]:
        """Each point within the bounds once, with its mean; what failed is as bad as the worst."""
        found = [o for _, o in chain(self.earlier, trials) if o is not None] or [0.0]
        failed = ((point, min(found)) for point, o in trials if o is None)
        awaited = ((point, fmean(found)) for point in pending)
        ended = ((point, o) for point, o in chain(self.earlier, trials) if o is not None)
        places: dict[tuple[float, ...], list[float]] = {}
        for point, objective in chain(ended, failed, awaited):
            if all(self.variables[k][0] <= v <= self.variables[k][1] for k, v in point.items()):
                places.setdefault(tuple(point[k] for k in self.variables), []).append(objective)
        return [(dict(zip(self.variables, at, strict=True)), fmean(o)) for at, o in places.items()]


def enough(objectives: Sequence[float | None], budget: Budget) -> bool:
    """Whether to stop after these trials; a tie with the best is an improvement, None failed."""
    best, stale = -float("inf"), 0
    for objective in objectives:
        if objective is not None and objective >= best:
            best, stale = objective, 0
        else:
            stale += 1
    early = len(objectives) >= budget.at_least and stale > budget.patience
    return early or len(objectives) >= budget.trials
