"""Attacks around another attack."""

from dataclasses import dataclass, replace

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class AttackDecorator(Attack):
    """An attack that does something with another: its threat and its strategies are the other's.

    Args:
        attack: the other.
    """

    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """That of the attack."""
        return self.attack.threat

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        """Those of the attack, each with the same done to it."""
        return [(p, replace(self, attack=part)) for p, part in self.attack.strategies(defense)]
