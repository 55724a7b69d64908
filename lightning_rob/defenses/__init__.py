"""Defenses: distributions over classifiers."""

from lightning_rob.defenses.base import Defense, Single, base_model
from lightning_rob.defenses.dann import DANN
from lightning_rob.defenses.dent import DENT
from lightning_rob.defenses.ensemble import Ensemble, Mixture, first_member
from lightning_rob.defenses.random_transforms import RandomTransforms, random_transforms_in
from lightning_rob.defenses.rmc import RMC
from lightning_rob.defenses.smoothing import Smoothing, is_smoothing
from lightning_rob.defenses.tadv import TADV
from lightning_rob.defenses.transform_ensemble import TransformEnsemble, is_transform_ensemble
from lightning_rob.defenses.urejectron import URejectron

__all__ = [
    "DANN",
    "DENT",
    "RMC",
    "TADV",
    "Defense",
    "Ensemble",
    "Mixture",
    "RandomTransforms",
    "Single",
    "Smoothing",
    "TransformEnsemble",
    "URejectron",
    "base_model",
    "first_member",
    "is_smoothing",
    "is_transform_ensemble",
    "random_transforms_in",
]
