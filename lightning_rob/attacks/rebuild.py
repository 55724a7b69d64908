"""Attacks with other arguments: an attack is a dataclass, perhaps of other attacks."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from lightning_rob.attacks.arc import ARC
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.paa import PAA
from lightning_rob.attacks.pgd import PGD


def parts(attack: Attack) -> Iterator[Attack]:
    """The attack and all that it is made of."""
    yield attack
    if not is_dataclass(attack):
        return
    for value in arguments(attack).values():
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

    made_of = {name: inner(value) for name, value in arguments(attack).items()}
    return replace(attack, **made_of | change(attack))  # type: ignore[type-var]


def arguments(attack: Attack) -> dict[str, Any]:
    """What the attack was made with.

    Raises:
        ValueError: it is not a dataclass.
    """
    if not is_dataclass(attack):
        raise ValueError(f"{type(attack).__name__} cannot be changed: it is not a dataclass")
    return {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}


def with_eps(attack: Attack, eps: float) -> Attack:
    """The attack in a ball of another radius; lengths of PGD and ARC keep their share of it.

    The radius of `PAA` is its largest dissimilarity, of which its `mean_bound` keeps its share.
    """

    def change(part: Attack) -> dict[str, Any]:
        if isinstance(part, PAA):  # its inner attack is that of one round
            bounds: dict[str, Any] = {"max_dissimilarity": eps}
            if part.mean_bound is not None:
                bounds["mean_bound"] = part.mean_bound * (eps / part.max_dissimilarity)
            return {"inner": part.inner} | bounds
        if "threat" not in arguments(part):
            return {}
        threat = {"threat": replace(part.threat, eps=eps)}
        if not isinstance(part, PGD | ARC):  # the step_size of others, as CW, is not in pixels
            return threat
        if part.threat.eps == 0:
            raise ValueError(f"step_size cannot be scaled with eps: it is 0 in {part}")
        return threat | {"step_size": part.step_size * (eps / part.threat.eps)}

    return rebuilt(attack, change)
