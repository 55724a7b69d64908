"""Variables of a sweep: how a value changes the attack, or the defense under attack."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import init_fields, map_attacks
from lightning_rob.defenses import Defense, Ensemble


@dataclass(frozen=True)
class Variable:
    """A variable of a sweep.

    Args:
        axis: the label of the figure's axis.
        attack: (attack, value) -> the attack with the value.
        defense: (defense, value) -> the defense with the value.
        field: the field that at least one attack must have.
        optimum: the side for which a value is marked as best, "defense" or "attack"; None for no
            mark.
    """

    axis: str
    attack: Callable[[Attack, float], Attack] = lambda attack, _: attack
    defense: Callable[[Defense, float], Defense] = lambda defense, _: defense
    field: str | None = None
    optimum: str | None = None


def with_count(name: str) -> Callable[[Attack, float], Attack]:
    """Return the function that sets a count, such as steps, in an attack and in all parts of it."""

    def changed(attack: Attack, count: float) -> Attack:
        return map_attacks(
            attack, lambda part: {name: int(count)} if name in init_fields(part) else {}
        )

    return changed


def with_probability(defense: Defense, p: float) -> Ensemble:
    """Return the ensemble whose first member is drawn with probability p.

    The others share the rest in proportion to their probabilities, equally if all of these are 0.

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
    """Return the ensemble of the first members, their probabilities scaled to sum to one.

    Raises:
        ValueError: not an ensemble, fewer members than `count`, or all of them without probability.
    """
    members, probs = _ensemble(defense)
    if count > len(probs):
        raise ValueError(f"members must be 1 … {len(probs)}, all that there are, got {count:g}")
    first = probs[: int(count)]
    if not first.sum() > 0:
        raise ValueError(f"the first {count:g} members have no probability: {probs.tolist()}")
    return _like(defense, members[: int(count)], first / first.sum())


def _ensemble(defense: Defense) -> tuple[list[torch.nn.Module], torch.Tensor]:
    if defense.kind != "ensemble":
        kind = type(defense).__name__
        raise ValueError(f"a sweep over probability or members needs an Ensemble, got {kind}")
    return defense.classifiers, defense.weights.double().cpu()


def _like(defense: Defense, members: list[torch.nn.Module], probs: torch.Tensor) -> Ensemble:
    return Ensemble(members, probs, defense.rule).to(defense.weights.device)


VARIABLES = {
    "probability": Variable(
        "sampling probability of the first member", defense=with_probability, optimum="defense"
    ),
    "members": Variable("members of the ensemble", defense=with_members, optimum="defense"),
    "eps": Variable("radius eps", attack=lambda attack, eps: attack.rescaled(eps)),
    "steps": Variable(
        "steps of the attack", attack=with_count("steps"), field="steps", optimum="attack"
    ),
    "neighbours": Variable(
        "neighbouring classes searched by ARC",
        attack=with_count("neighbours"),
        field="neighbours",
        optimum="attack",
    ),
}
