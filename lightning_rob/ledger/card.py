"""The threat-model card: what an attacker might do and knew, and against what."""

from typing import Any

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import parts
from lightning_rob.ledger.identity import describe

KNOWS = {
    "AutoAttack": "weights and answers; with Square, answers alone",
    "Corrupted": "nothing: corruptions of nature",
    "OnStatic": "the defense before it adapts",
    "TAA": "one sub-model, in its own space, and the answers of the others",
    "OnDifferentiable": "the sub-models that have a gradient",
    "GMSA": "all of the defense but its private chance; rehearses the adaptation",
    "ThroughAdaptation": "all of the defense but its private chance; differentiates the adaptation",
}
WHITE_BOX = "all of the defense but its private chance"


def card_of(attack: Attack) -> dict[str, Any]:
    """What an attack may do and knows.

    Returns:
        Norm and radius, steps, restarts and draws where the attack or a part of it has them, what
        the attacker knows, and the attack with all its arguments.
    """
    threat, every = attack.threat, list(parts(attack))
    card = {
        "norm": str(threat.norm),
        "eps": threat.eps,
        "relative": threat.relative,
        "bounds": list(threat.bounds),
    }
    for name in ("steps", "restarts", "draws"):
        values = [getattr(part, name) for part in every if getattr(part, name, None) is not None]
        card[name] = max(values, default=None)
    known = [KNOWS[kind] for part in every if (kind := type(part).__name__) in KNOWS]
    return card | {"knows": known[0] if known else WHITE_BOX, "attack": describe(attack)}
