"""The search of `tune`: its space, where to try next, and when to stop; all pure functions."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain
from statistics import fmean
from typing import Any

from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound

from lightning_rob.randomness import derive_seed

Point = dict[str, float]
Bound = tuple[float, float] | tuple[float, float, type[int]]
Observation = tuple[Point, float | None]  # None: the trial failed

SECTIONS = ("variables", "objective", "trial", "prune", "budget")
NEAR_ZERO = 0.01  # of alpha and p: `prune: true`
TRANSFORM = r"((?:.*\.)?transforms)\.([^.]+)\.[^.]+"
KAPPA = 2.576  # the library's default, and that of Ray Tune when the authors used it


@dataclass(frozen=True)
class Budget:
    """Numbers of trials; defaults of Sitawarin et al. 2022.

    Args:
        trials: maximum.
        min_trials: minimum before stopping early.
        patience: stop after more than this number in a row without improvement.
        random: random ones before the optimizer proposes.
        diagonal: ones on the diagonal of the space, before the random ones.

    Raises:
        ValueError: not a whole number, or too small.
    """

    trials: int = 160
    min_trials: int = 80
    patience: int = 40
    random: int = 12
    diagonal: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, minimum = getattr(self, field.name), int(field.name == "trials")
            if type(value) is not int or value < minimum:
                raise ValueError(
                    f"{field.name} must be whole and at least {minimum}, got {value!r}"
                )

    def with_(self, changes: Mapping[str, Any]) -> "Budget":
        """Return a copy with other numbers.

        Raises:
            ValueError: an unknown name, or an invalid number.
        """
        names = [field.name for field in fields(self)]
        if unknown := [name for name in changes if name not in names]:
            raise ValueError(f"budget: choose from {', '.join(names)}, got {unknown[0]!r}")
        return replace(self, **changes)


@dataclass(frozen=True)
class Space:
    """The search space: dotted keys into a recipe, and the objective of a trial.

    Args:
        variables: dotted key -> (low, high), or (low, high, int) for whole numbers.
        objective: logged metric -> its weight in the maximized sum.
        trial: dotted key -> value that makes a trial cheap.
        prune: trials and final recipe omit the transforms whose variable is at most this; None
            keeps them all.
        budget: numbers of trials instead of the defaults.
    """

    variables: dict[str, Bound]
    objective: dict[str, float]
    trial: dict[str, Any]
    prune: float | None
    budget: dict[str, Any]

    @classmethod
    def read(cls, content: Any) -> "Space":
        """Build the space from a YAML file's content.

        Raises:
            ValueError: it does not describe a space.
        """
        given = content if isinstance(content, dict) else {}
        if unknown := [name for name in given if name not in SECTIONS]:
            raise ValueError(f"sections are {', '.join(SECTIONS)}, got {unknown[0]!r}")
        mappings = {name: given.get(name) or {} for name in SECTIONS if name != "prune"}
        for name, section in mappings.items():
            if not isinstance(section, dict):
                raise ValueError(f"{name} must be a mapping, got {section!r}")
        variables, objective, trial, budget = mappings.values()
        if not (variables and objective):
            raise ValueError("it needs variables and an objective, such as {val/robust/pgd: 1.0}")
        bounds = {key: _bound(key, bound) for key, bound in variables.items()}
        weights = {metric: _number(metric, w) for metric, w in objective.items()}
        if not any(weights.values()):
            raise ValueError(f"objective needs a weight other than 0, got {weights}")
        return cls(bounds, weights, trial, _prune_limit(given.get("prune")), budget)

    def initial(self, recipe: Any) -> Point:
        """Return the values of the variables in a recipe.

        Raises:
            ValueError: a key is missing, or its value is not a number.
        """
        return {key: _number(key, value_at(recipe, key)) for key in self.variables}

    def contains(self, point: Point) -> bool:
        """Whether all values are within their bounds."""
        return all(b[0] <= point[key] <= b[1] for key, b in self.variables.items())

    def point(self, values: Point, trained: Any, recipe: Any) -> Point | None:
        """Return a trial of a study of other variables as a point of this space.

        Args:
            values: of the other study's variables.
            trained: the trial's recipe, which has the variables that were fixed there.
            recipe: that of this space; it has those that are fixed here.

        Returns:
            None if a variable of the other study has another value here. A transform that a recipe
            lacks has strength 0.

        Raises:
            ValueError: a recipe lacks a variable that is no transform's.
        """
        limit = -math.inf if self.prune is None else self.prune
        for key, value in values.items():
            if key not in self.variables:
                here = _strength(recipe, key)
                if value != here and max(value, here) > limit:
                    return None
        return {k: values[k] if k in values else _strength(trained, k) for k in self.variables}

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the objective, the weighted sum of metrics.

        Raises:
            ValueError: a metric was not logged.
        """
        for name in self.objective:
            if name not in metrics:
                logged = ", ".join(sorted(metrics)) or "nothing"
                raise ValueError(f"objective: a trial does not log {name!r}; it logs {logged}")
        return sum(weight * metrics[name] for name, weight in self.objective.items())

    def pruned(self, recipe: Any, point: Mapping[str, float]) -> tuple[Any, list[str]]:
        """Return the recipe without transforms that the values switch off, and their names.

        A `size` beside the transforms shrinks with their number. If none would be left, all stay:
        switched off, they are a plain network.
        """
        slim, dropped = deepcopy(recipe), []
        limit = -math.inf if self.prune is None else self.prune
        for key, value in point.items():
            match = re.fullmatch(TRANSFORM, key)
            if value > limit or match is None or match[2] in dropped:
                continue
            parent, name = _locate(slim, match[1])
            del parent[name][match[2]]
            dropped.append(match[2])
            if not parent[name]:
                return recipe, []
            if isinstance(parent.get("size"), int):
                parent["size"] = min(parent["size"], len(parent[name]))
        return slim, dropped


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key, in which numbers are indices of lists.

    Raises:
        ValueError: there is no such key; the message names the nearest one.
    """
    parent, last = _locate(config, key)
    return parent[last]


def _strength(recipe: Any, key: str) -> float:
    """Return the number at a dotted key; 0 for a transform that the recipe lacks."""
    if match := re.fullmatch(TRANSFORM, key):
        parent, name = _locate(recipe, match[1])
        if match[2] not in parent[name]:
            return 0.0
    return _number(key, value_at(recipe, key))


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy with other values at existing dotted keys."""
    config = deepcopy(config)
    for key, value in values.items():
        parent, last = _locate(config, key)
        parent[last] = deepcopy(value)
    return config


def _locate(config: Any, key: str) -> tuple[Any, Any]:
    """Return the innermost container of a dotted key, and the last part of the key."""
    parent, last, node = None, None, config
    for part in key.split("."):
        children = _children(node)
        if part not in children:
            near = get_close_matches(key, [*_keys(config)], n=1, cutoff=0)
            raise ValueError(f"the recipe has no {key!r}; nearest is {near[0] if near else None}")
        parent, last = node, int(part) if isinstance(node, list) else part
        node = children[part]
    return parent, last


def _children(node: Any) -> dict[str, Any]:
    """Return the parts of a mapping or a list by their part of a dotted key."""
    if isinstance(node, list):
        return {str(index): child for index, child in enumerate(node)}
    return node if isinstance(node, dict) else {}


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    for name, child in _children(config).items():
        yield f"{prefix}{name}"
        yield from _keys(child, f"{prefix}{name}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value


def _bound(key: str, bound: Any) -> Bound:
    if not isinstance(bound, list) or len(bound) not in (2, 3) or bound[2:] not in ([], ["int"]):
        raise ValueError(f"{key} must be [low, high] or [low, high, int], got {bound!r}")
    low, high = (_number(key, end) for end in bound[:2])
    if low >= high:
        raise ValueError(f"{key}: low must be below high, got {bound!r}")
    return (int(low), int(high), int) if bound[2:] else (float(low), float(high))


def _prune_limit(prune: Any) -> float | None:
    if prune is None or isinstance(prune, bool):
        return NEAR_ZERO if prune else None
    return _number("prune", prune)


@dataclass(frozen=True)
class Search:
    """Proposes points: the recipe's own, the diagonal, random ones, then the optimizer's.

    Each proposal has its own random stream: it depends on the seed, its number and the trials so
    far, and not on interruptions.

    Args:
        variables: key -> bounds.
        own: the recipe's values, trial 0.
        budget: number of trials of each kind.
        seed: of all randomness.
        earlier: results of another study; they replace as many random trials.
    """

    variables: Mapping[str, Bound]
    own: Point
    budget: Budget
    seed: int
    earlier: Sequence[tuple[Point, float]] = ()

    @property
    def initial(self) -> int:
        """The number of trials before the optimizer proposes."""
        at_random = max(self.budget.random - len(self.earlier), 0)
        return 1 + self.budget.diagonal + at_random

    def propose(
        self, number: int, trials: Sequence[Observation], pending: Sequence[Point] = ()
    ) -> Point:
        """Return the values of a trial.

        Args:
            number: of the trial.
            trials: the finished ones.
            pending: points of running trials; until they end they count as average.
        """
        if number == 0:
            return self.own
        if number <= self.budget.diagonal:
            return self._diagonal((number - 1) / self.budget.diagonal)
        optimizer = self._optimizer(derive_seed(self.seed, number) % 2**32)
        if number < self.initial:
            return self._typed(optimizer.random_sample(1)[0])
        for point, objective in self.observations(trials, pending):
            optimizer.register(point, objective)
        return self._typed(optimizer.suggest())

    def _diagonal(self, share: float) -> Point:
        return self._typed({k: b[0] + (b[1] - b[0]) * share for k, b in self.variables.items()})

    def _optimizer(self, seed: int) -> BayesianOptimization:
        method = UpperConfidenceBound(KAPPA)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Non-float parameters are experimental")
            return BayesianOptimization(None, dict(self.variables), method, None, seed, verbose=0)

    def _typed(self, point: Mapping[str, Any]) -> Point:
        kinds = {key: round if len(bound) == 3 else float for key, bound in self.variables.items()}
        return {key: kind(point[key]) for key, kind in kinds.items()}

    def observations(
        self, trials: Sequence[Observation], pending: Sequence[Point]
    ) -> list[tuple[Point, float]]:
        """Return each point within the bounds once, with its mean objective.

        A failed trial counts as the worst one: it may not be missing, or its neighbourhood would
        be tried again.
        """
        ended = [(p, o) for p, o in chain(self.earlier, trials) if o is not None]
        found = [objective for _, objective in ended] or [0.0]
        failed = ((point, min(found)) for point, o in trials if o is None)
        running = ((point, fmean(found)) for point in pending)
        places: dict[tuple[float, ...], list[float]] = {}
        for point, objective in chain(ended, failed, running):
            if all(self.variables[k][0] <= v <= self.variables[k][1] for k, v in point.items()):
                places.setdefault(tuple(point[k] for k in self.variables), []).append(objective)
        return [(dict(zip(self.variables, at, strict=True)), fmean(o)) for at, o in places.items()]


def is_finished(objectives: Sequence[float | None], budget: Budget) -> bool:
    """Whether to stop after these trials; a tie with the best improves, None is a failure."""
    best, stale = -math.inf, 0
    for objective in objectives:
        if objective is not None and objective >= best:
            best, stale = objective, 0
        else:
            stale += 1
    early = len(objectives) >= budget.min_trials and stale > budget.patience
    return early or len(objectives) >= budget.trials
