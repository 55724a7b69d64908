"""What a value of each variable means: a change of the attack, or of what is attacked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from lightning_rob.attacks import ARC, PGD, Attack
from lightning_rob.defenses import Defense, Ensemble


def parts(attack: Attack) -> Iterator[Attack]:
    """The attack and all that it is made of."""
    yield attack
    for value in _fields(attack).values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Attack):
                yield from parts(part)


def rebuilt(attack: Attack, change: Callable[[Attack], dict[str, Any]]) -> Attack:
    """The attack with fields changed, those of the attacks it is made of as well.

    Args:
        attack: a dataclass.
        change: attack -> its fields that become others.
    """

    def inner(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(inner(part) for part in value)
        return rebuilt(value, change) if isinstance(value, Attack) else value

    made_of = {name: inner(value) for name, value in _fields(attack).items()}
    return replace(attack, **made_of | change(attack))  # type: ignore[type-var]


def _fields(attack: Attack) -> dict[str, Any]:
    if not is_dataclass(attack):
        raise ValueError(f"{type(attack).__name__} cannot be swept: it is not a dataclass")
    return {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}


def with_eps(attack: Attack, eps: float) -> Attack:
    """The attack in a ball of another radius; lengths of PGD and ARC keep their share of it."""

    def change(part: Attack) -> dict[str, Any]:
        if "threat" not in _fields(part):
            return {}
        threat = {"threat": replace(part.threat, eps=eps)}
        if not isinstance(part, PGD | ARC):  # the step_size of others, as CW, is not in pixels
            return threat
        if part.threat.eps == 0:
            raise ValueError(f"step_size cannot be scaled with eps: it is 0 in {part}")
        return threat | {"step_size": part.step_size * (eps / part.threat.eps)}

    return rebuilt(attack, change)


def with_count(name: str) -> Callable[[Attack, float], Attack]:
    """The change of a count, such as steps, wherever an attack has one of that name."""

    def changed(attack: Attack, count: float) -> Attack:
        return rebuilt(attack, lambda part: {name: int(count)} if name in _fields(part) else {})

    return changed


def with_probability(defense: Defense, p: float) -> Ensemble:
    """The ensemble whose first member answers with probability p.

    The others share the rest in proportion to what they had, equally if they had nothing.

    Raises:
        ValueError: not an ensemble of two or more.
    """
    members, probs = _ensemble(defense)
    if len(probs) < 2:
        raise ValueError("a sweep over probability needs at least 2 members, got 1")
    others = probs[1:] if probs[1:].sum() > 0 else torch.ones_like(probs[1:])
    rest = (1 - p) * others / others.sum()
    return _like(defense, members, torch.cat([torch.full_like(probs[:1], p), rest]))


def with_members(defense: Defense, count: float) -> Ensemble:
    """The ensemble of the first members, their probabilities scaled to sum to one.

    Raises:
        ValueError: not an ensemble, fewer members than that, or all of them without probability.
    """
    members, probs = _ensemble(defense)
    if count > len(probs):
        raise ValueError(f"members must be 1 … {len(probs)}, all that there are, got {count:g}")
    first = probs[: int(count)]
    if not first.sum() > 0:
        raise ValueError(f"the first {count:g} members have no probability: {probs.tolist()}")
    return _like(defense, members[: int(count)], first / first.sum())


def _ensemble(defense: Defense) -> tuple[list[torch.nn.Module], torch.Tensor]:
    if not isinstance(defense, Ensemble):
        kind = type(defense).__name__
        raise ValueError(f"a sweep over probability or members needs an Ensemble, got {kind}")
    return defense.classifiers, defense.weights.double().cpu()


def _like(defense: Defense, members: list[torch.nn.Module], probs: torch.Tensor) -> Ensemble:
    return Ensemble(members, probs, defense.rule).to(defense.weights.device)


@dataclass(frozen=True)
class Variable:
    """What is varied.

    Args:
        attack: (attack, value) -> the attack meant by the value.
        defense: (defense, value) -> the defense meant by the value.
        field: the field that at least one attack must have.
        sought: whose best value is marked: the defense's, the attack's or nobody's.
        axis: the label of the figure's axis.
    """

    axis: str
    attack: Callable[[Attack, float], Attack] = lambda attack, _: attack
    defense: Callable[[Defense, float], Defense] = lambda defense, _: defense
    field: str | None = None
    sought: str | None = None


VARIABLES = {
    "probability": Variable(
        "sampling probability of the first member", defense=with_probability, sought="defense"
    ),
    "members": Variable("members of the ensemble", defense=with_members, sought="defense"),
    "eps": Variable("radius eps", attack=with_eps),
    "steps": Variable(
        "steps of the attack", attack=with_count("steps"), field="steps", sought="attack"
    ),
    "neighbours": Variable(
        "neighbouring classes searched by ARC",
        attack=with_count("neighbours"),
        field="neighbours",
        sought="attack",
    ),
}
