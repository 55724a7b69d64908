"""The search space of `tune`: dotted keys into a recipe, the objective and the budget."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

Point = dict[str, float]
Bound = tuple[float, float] | tuple[float, float, type[int]]

SECTIONS = ("variables", "objective", "trial", "prune", "budget")
NEAR_ZERO = 0.01  # of alpha and p: `prune: true`
TRANSFORM = r"((?:.*\.)?transforms)\.([^.]+)\.[^.]+"


@dataclass(frozen=True)
class Budget:
    """Numbers of trials; defaults of Sitawarin et al. 2022."""

    trials: int = 160
    min_trials: int = 80  # before the search may stop early
    patience: int = 40  # trials in a row without improvement
    random: int = 12  # before the optimizer proposes
    stop_after: int = 0  # validations, from which on a trial below the median stops; 0 never

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
    trial: dict[str, Any]  # values by dotted key that make a trial cheap
    prune: float  # transforms whose variable is at most this are left out; -inf keeps all
    budget: Budget

    @classmethod
    def read(cls, content: Any) -> "Space":
        given = content if isinstance(content, dict) else {}
        if unknown := [name for name in given if name not in SECTIONS]:
            raise ValueError(f"sections are {', '.join(SECTIONS)}, got {unknown[0]!r}")
        mappings = {name: given.get(name) or {} for name in SECTIONS if name != "prune"}
        for name, section in mappings.items():
            if not isinstance(section, dict):
                raise ValueError(f"{name} must be a mapping, got {section!r}")
        # All is checked here: a trial would only find out after its training.
        variables, objective, trial, budget = mappings.values()
        if not (variables and objective):
            raise ValueError("it needs variables and an objective, such as {val/robust/pgd: 1.0}")
        bounds: dict[str, Bound] = {}
        for key, bound in variables.items():
            fits = isinstance(bound, list) and len(bound) >= 2 and bound[2:] in ([], ["int"])
            if not fits:
                raise ValueError(f"{key} must be [low, high] or [low, high, int], got {bound!r}")
            low, high = (_number(key, end) for end in bound[:2])
            if low >= high:
                raise ValueError(f"{key}: low must be below high, got {bound!r}")
            bounds[key] = (int(low), int(high), int) if bound[2:] else (float(low), float(high))
        weights = {metric: _number(metric, w) for metric, w in objective.items()}
        if not any(weights.values()):
            raise ValueError(f"objective needs a weight other than 0, got {weights}")
        prune = given.get("prune", False)
        if prune is None or isinstance(prune, bool):
            prune = NEAR_ZERO if prune else -math.inf
        else:
            prune = _number("prune", prune)
        known = [one.name for one in fields(Budget)]
        if unknown := [name for name in budget if name not in known]:
            raise ValueError(f"budget: choose from {', '.join(known)}, got {unknown[0]!r}")
        return cls(bounds, weights, trial, prune, Budget(**budget))

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
            if value > self.prune or match is None or match[2] in dropped:
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
        children = _children(node)
        if part not in children:
            near = get_close_matches(key, [*_keys(config)], n=1, cutoff=0)
            raise ValueError(f"the recipe has no {key!r}; nearest is {near[0] if near else None}")
        parent, last = node, int(part) if isinstance(node, list) else part
        node = children[part]
    return parent, last


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, list):
        return {str(index): child for index, child in enumerate(node)}
    return node if isinstance(node, dict) else {}


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    for name, child in _children(config).items():
        yield f"{prefix}{name}"
        yield from _keys(child, f"{prefix}{name}.")
