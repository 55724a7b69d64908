"""The search space of `tune`: dotted keys into a recipe, the objective and the budget."""

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Point = dict[str, float]
Bound = tuple[float, float] | tuple[float, float, type[int]]

TRANSFORM = r"((?:.*\.)?transforms)\.([^.]+)\.[^.]+"


@dataclass(frozen=True)
class Budget:
    """Numbers of trials; defaults of Sitawarin et al. 2022."""

    trials: int = 160
    min_trials: int = 80  # before the search may stop early
    patience: int = 40  # trials in a row without improvement
    random: int = 12  # before the optimizer proposes

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            minimum = int(name == "trials")
            if type(value) is not int or value < minimum:
                raise ValueError(f"{name} must be whole and at least {minimum}, got {value!r}")

    def is_finished(self, objectives: Sequence[float | None]) -> bool:
        """Whether to stop after these trials; a tie with the best improves, None is a failure."""
        best, stale = -math.inf, 0
        for objective in objectives:
            if objective is not None and objective >= best:
                best, stale = objective, 0
            else:
                stale += 1
        early = len(objectives) >= self.min_trials and stale > self.patience
        return early or len(objectives) >= self.trials


@dataclass(frozen=True)
class Space:
    """The search space: dotted keys into a recipe, and the objective of a trial."""

    variables: dict[str, Bound]  # bounds by dotted key; whole numbers have `int` as a third
    objective: dict[str, float]  # weight of each logged metric in the maximized sum
    trial: dict[str, Any] = field(default_factory=dict)  # values that make a trial cheap
    prune: bool | float = False  # leave out transforms whose variable is at most this; True: 0.01
    budget: Budget = Budget()

    @classmethod
    def read(cls, content: Any) -> "Space":
        """Return the space of a file; a trial would find a mistake after its training only."""
        try:
            space = cls(**content)
            bounds: dict[str, Bound] = {}
            for key, bound in space.variables.items():
                low, high, *kind = bound
                whole = [*map(str, kind)] == ["int"]
                if not (whole or not kind) or not _number(key, low) < _number(key, high):
                    raise ValueError(f"{key} must be [low, high] or [low, high, int], got {bound}")
                bounds[key] = (int(low), int(high), int) if whole else (float(low), float(high))
            weights = {metric: _number(metric, w) for metric, w in space.objective.items()}
            budget = Budget(**content.get("budget") or {})
        except (TypeError, AttributeError) as error:  # a section that is unknown or no mapping
            raise ValueError(str(error)) from error
        if not (bounds and any(weights.values())):
            raise ValueError("it needs variables and an objective, such as {val/robust/pgd: 1.0}")
        return replace(space, variables=bounds, objective=weights, budget=budget)

    @property
    def near_zero(self) -> float:
        """The value up to which a variable switches its transform off."""
        return self.prune if not isinstance(self.prune, bool) else 0.01 if self.prune else -math.inf

    def initial(self, recipe: Any) -> Point:
        return {key: _number(key, value_at(recipe, key)) for key in self.variables}

    def contains(self, point: Point) -> bool:
        return all(b[0] <= point[key] <= b[1] for key, b in self.variables.items())

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the objective, the weighted sum of metrics."""
        for name in self.objective:
            if name not in metrics:
                logged = ", ".join(sorted(metrics)) or "nothing"
                raise ValueError(f"objective: a trial does not log {name!r}; it logs {logged}")
        return sum(weight * metrics[name] for name, weight in self.objective.items())

    def pruned(self, recipe: Any, point: Mapping[str, float]) -> tuple[Any, list[str]]:
        """Return the recipe without transforms that the values switch off, and their names."""
        slim, dropped = deepcopy(recipe), []
        for key, value in point.items():
            match = re.fullmatch(TRANSFORM, key)
            if value > self.near_zero or match is None or match[2] in dropped:
                continue
            parent, name = _locate(slim, match[1])
            del parent[name][match[2]]
            dropped.append(match[2])
            if not parent[name]:
                return recipe, []  # switched off, all of them are a plain network
            # No draw can take more transforms than there are.
            if isinstance(parent.get("size"), int):
                parent["size"] = min(parent["size"], len(parent[name]))
        return slim, dropped


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key, in which numbers are indices of lists."""
    parent, last = _locate(config, key)
    return parent[last]


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
        children = dict(enumerate(node)) if isinstance(node, list) else node
        name = int(part) if isinstance(node, list) and part.isdigit() else part
        if not isinstance(children, dict) or name not in children:
            there = ", ".join(map(str, children)) if isinstance(children, dict) else "no keys"
            raise ValueError(f"the recipe has no {key!r}: at {part!r} there are {there}")
        parent, last, node = node, name, children[name]
    return parent, last
