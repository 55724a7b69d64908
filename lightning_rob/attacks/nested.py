"""Attacks inside attacks: among their arguments, and in lists and mappings there."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from lightning_rob.attacks.budget import Counted

A = TypeVar("A", bound=Counted)  # an attack


def init_fields(attack: Counted) -> dict[str, Any]:
    """Return the arguments that the attack was created with."""
    if not is_dataclass(attack):
        raise ValueError(f"{type(attack).__name__} cannot be changed: it is not a dataclass")
    return {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}


def inner_attacks(attack: A) -> Iterator[A]:
    """Yield the attacks among its arguments."""
    if is_dataclass(attack):
        yield from _attacks_in(list(init_fields(attack).values()))


def walk(attack: A) -> Iterator[A]:
    """Yield the attack and all attacks inside it."""
    yield attack
    for inner in inner_attacks(attack):
        yield from walk(inner)


def map_attacks(attack: A, change: Callable[[A], dict[str, Any]]) -> A:
    """Return a copy of the attack with fields changed, in the attacks inside it too."""
    inner = mapped_arguments(attack, lambda part: map_attacks(part, change))
    return replace(attack, **inner | change(attack))  # type: ignore[type-var]


def mapped_arguments(attack: A, change: Callable[[A], A]) -> dict[str, Any]:
    """Return the attack's arguments with `change` applied to the attacks among them."""

    def changed(value: Any) -> Any:
        # A value without an attack stays the same object.
        if next(_attacks_in(value), None) is None:
            return value
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        if isinstance(value, list | set | frozenset):
            return type(value)(map(changed, value))
        if isinstance(value, Mapping):
            return {key: changed(item) for key, item in value.items()}
        return change(value)

    return {name: changed(value) for name, value in init_fields(attack).items()}


def _attacks_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Counted):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _attacks_in(part)
