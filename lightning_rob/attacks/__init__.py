"""Attacks: frozen dataclasses called as x_adv = attack(defense, x, y, generator)."""

from lightning_rob.attacks.arc import ARC, arc_linear
from lightning_rob.attacks.auto import AutoAttack
from lightning_rob.attacks.base import Attack, attacking, evaluating
from lightning_rob.attacks.cw import CW
from lightning_rob.attacks.deepfool import DeepFool
from lightning_rob.attacks.member import OnMember, RandomMember
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.strongest import Strongest

__all__ = [
    "ARC",
    "CW",
    "PGD",
    "Attack",
    "AutoAttack",
    "DeepFool",
    "OnMember",
    "RandomMember",
    "Strongest",
    "arc_linear",
    "attacking",
    "evaluating",
]
