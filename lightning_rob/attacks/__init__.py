"""Attacks: frozen dataclasses called as x_adv = attack(defense, x, y, generator)."""

from lightning_rob.attacks.apgd import APGD
from lightning_rob.attacks.arc import ARC, arc_linear
from lightning_rob.attacks.auto import Auto
from lightning_rob.attacks.autoattack import AutoAttack
from lightning_rob.attacks.backward import SGM, InsideBounds, LinBP, SurrogateTransforms
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.contexts import attacking, evaluating
from lightning_rob.attacks.controls import (
    CommonCorruption,
    DoublePrecision,
    NoAttack,
    RandomCorners,
    RandomStart,
)
from lightning_rob.attacks.cw import CW
from lightning_rob.attacks.ddn import DDN
from lightning_rob.attacks.decorators import (
    Accelerated,
    Budgeted,
    Chunked,
    Quantized8Bit,
    WithBackward,
)
from lightning_rob.attacks.deepfool import DeepFool
from lightning_rob.attacks.fab import FAB
from lightning_rob.attacks.foreign import Foreign
from lightning_rob.attacks.gmsa import GMSA
from lightning_rob.attacks.gradient import draw_gradients
from lightning_rob.attacks.lattice_climber import LatticeClimber
from lightning_rob.attacks.members import OnMember, RandomMember, Strongest
from lightning_rob.attacks.minimal_norm import MinimalNorm
from lightning_rob.attacks.optimizers import Adam, AggMo, AttackOptimizer, Nesterov, aggmo
from lightning_rob.attacks.pdgd import PDGD
from lightning_rob.attacks.pgd import PGD
from lightning_rob.attacks.search import AutoResult
from lightning_rob.attacks.square import Square
from lightning_rob.attacks.surrogate import SurrogateGradient
from lightning_rob.attacks.targeted import HighConfidence, Targeted
from lightning_rob.attacks.traces import Trace, trace
from lightning_rob.attacks.transductive import (
    PartialBatchAttack,
    ThroughAdaptation,
    TransferFromStatic,
)
from lightning_rob.attacks.transform_ensemble import PAA, TAA, OnDifferentiable, ranking_weights

__all__ = [
    "APGD",
    "ARC",
    "CW",
    "DDN",
    "FAB",
    "GMSA",
    "PAA",
    "PDGD",
    "PGD",
    "SGM",
    "TAA",
    "Accelerated",
    "Adam",
    "AggMo",
    "Attack",
    "AttackOptimizer",
    "Auto",
    "AutoAttack",
    "AutoResult",
    "Budgeted",
    "Chunked",
    "CommonCorruption",
    "DeepFool",
    "DoublePrecision",
    "Foreign",
    "HighConfidence",
    "InsideBounds",
    "LatticeClimber",
    "LinBP",
    "MinimalNorm",
    "Nesterov",
    "NoAttack",
    "OnDifferentiable",
    "OnMember",
    "PartialBatchAttack",
    "Quantized8Bit",
    "RandomCorners",
    "RandomMember",
    "RandomStart",
    "Square",
    "Strongest",
    "SurrogateGradient",
    "SurrogateTransforms",
    "Targeted",
    "ThroughAdaptation",
    "Trace",
    "TransferFromStatic",
    "WithBackward",
    "aggmo",
    "arc_linear",
    "attacking",
    "draw_gradients",
    "evaluating",
    "ranking_weights",
    "trace",
]
