"""The threat-model card: what an attacker might do and knew, and against what."""

from typing import Any

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import inner_attacks, walk
from lightning_rob.ledger.identity import describe


def card_of(attack: Attack) -> dict[str, Any]:
    """What an attack may do and knows.

    Returns:
        Norm and radius, steps, restarts and draws where the attack or a part of it has them, what
        the attacker knows, and the attack with all its arguments.
    """
    threat, every = attack.threat, list(walk(attack))
    card = {
        "norm": str(threat.norm),
        "eps": threat.eps,
        "relative": threat.relative,
        "bounds": list(threat.bounds),
    }
    for name in ("steps", "restarts", "draws"):
        values = [getattr(part, name) for part in every if getattr(part, name, None) is not None]
        card[name] = max(values, default=None)
    return card | {"knows": known_to(attack), "attack": describe(attack)}


def known_to(attack: Attack) -> str:
    """Return what the attacker knows: of attacks made of others, what these know."""
    if attack.knowledge != Attack.knowledge:
        return attack.knowledge
    known = dict.fromkeys(map(known_to, inner_attacks(attack)))
    return "; ".join(known) or attack.knowledge
