"""The search space: a YAML file of dotted keys into a recipe, and what a trial is judged by."""

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Point = dict[str, float]
Bound = tuple[float, float] | tuple[float, float, type[int]]
SECTIONS = ("variables", "objective", "trial", "prune", "budget")
NEAR_ZERO = 0.01  # of alpha and p: `prune: true`
TRANSFORM = r"((?:.*\.)?transforms)\.([^.]+)\.[^.]+"


@dataclass(frozen=True)
class Space:
    """What is searched.

    Args:
        variables: dotted key -> (low, high), or (low, high, int) for whole numbers.
        objective: logged metric -> its weight in what is maximised.
        trial: dotted key -> value that makes a trial cheap.
        prune: trials and final recipe are without the transforms whose variable is at most this;
            None keeps them all.
        budget: numbers of trials instead of the defaults.
    """

    variables: dict[str, Bound]
    objective: dict[str, float]
    trial: dict[str, Any]
    prune: float | None
    budget: dict[str, Any]

    @classmethod
    def read(cls, content: Any) -> "Space":
        """The space that a YAML file's content describes.

        Raises:
            ValueError: it describes none.
        """
        sections = content if isinstance(content, dict) else {}
        if unknown := [name for name in sections if name not in SECTIONS]:
            raise ValueError(f"sections are {', '.join(SECTIONS)}, got {unknown[0]!r}")
        for name in ("variables", "objective", "trial", "budget"):
            if not isinstance(sections.get(name) or {}, dict):
                raise ValueError(f"{name} must be a mapping, got {sections[name]!r}")
        if not (sections.get("variables") and sections.get("objective")):
            raise ValueError("it needs variables and an objective, such as {val/robust/pgd: 1.0}")
        variables = {key: _bound(key, b) for key, b in sections["variables"].items()}
        weights = {metric: _number(metric, w) for metric, w in sections["objective"].items()}
        if not any(weights.values()):
            raise ValueError(f"objective needs a weight other than 0, got {weights}")
        prune = sections.get("prune")
        if prune is None or isinstance(prune, bool):
            limit = NEAR_ZERO if prune else None
        else:
            limit = _number("prune", prune)
        trial, budget = (sections.get(name) or {} for name in ("trial", "budget"))
        return cls(variables, weights, trial, limit, budget)

    def own(self, recipe: Any) -> Point:
        """The values that the recipe has.

        Raises:
            ValueError: no such key, or no number there.
        """
        return {key: _number(key, value_at(recipe, key)) for key in self.variables}

    def contains(self, point: Point) -> bool:
        """Whether all values are within their bounds."""
        ends = {key: bound[:2] for key, bound in self.variables.items()}
        return all(low <= point[key] <= high for key, (low, high) in ends.items())

    def score(self, metrics: Mapping[str, float]) -> float:
        """What is maximised.

        Raises:
            ValueError: a metric was not logged.
        """
        for name in self.objective:
            if name not in metrics:
                logged = ", ".join(sorted(metrics)) or "nothing"
                raise ValueError(f"objective: a trial does not log {name!r}; it logs {logged}")
        return sum(weight * metrics[name] for name, weight in self.objective.items())

    def pruned(self, recipe: Any, point: Mapping[str, float]) -> tuple[Any, list[str]]:
        """The recipe without the transforms that the values switch off, and their names.

        A `size` beside the transforms becomes as small as they are many. Where none would be left,
        all stay: switched off they are a plain network.
        """
        slim, dropped = deepcopy(recipe), []
        limit = -math.inf if self.prune is None else self.prune
        for key, value in point.items():
            if value <= limit and (match := re.fullmatch(TRANSFORM, key)):
                if match[2] in dropped:
                    continue
                del value_at(slim, match[1])[match[2]]
                dropped.append(match[2])
                left = len(value_at(slim, match[1]))
                if not left:
                    return recipe, []
                holder, _ = _place(slim, match[1])
                if isinstance(holder.get("size"), int):
                    holder["size"] = min(holder["size"], left)
        return slim, dropped


def value_at(config: Any, key: str) -> Any:
    """What is at a dotted key; numbers are places in lists.

    Raises:
        ValueError: there is no such key; the message has the nearest one.
    """
    holder, place = _place(config, key)
    return holder[place]


def changed(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy with other values at dotted keys, which must be there."""
    config = deepcopy(config)
    for key, value in values.items():
        holder, place = _place(config, key)
        holder[place] = deepcopy(value)
    return config


def _place(config: Any, key: str) -> tuple[Any, Any]:
    holder, place, part = None, None, config
    for step in key.split("."):
        places = dict(enumerate(part)) if isinstance(part, list) else part
        holder, place = part, int(step) if isinstance(part, list) and step.isdigit() else step
        if not isinstance(places, dict) or place not in places:
            near = get_close_matches(key, [*_keys(config)], n=1, cutoff=0)
            raise ValueError(f"the recipe has no {key!r}; nearest is {near[0] if near else None}")
        part = places[place]
    return holder, place


def _keys(config: Any, above: str = "") -> Iterator[str]:
    parts = dict(enumerate(config)) if isinstance(config, list) else config
    for name, part in parts.items() if isinstance(parts, dict) else ():
        yield f"{above}{name}"
        yield from _keys(part, f"{above}{name}.")


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
