"""Defenses: distributions over classifiers."""

from lightning_rob.defenses.base import Defense as Defense
from lightning_rob.defenses.base import Single as Single
from lightning_rob.defenses.base import base_model as base_model
from lightning_rob.defenses.dann import DANN as DANN
from lightning_rob.defenses.dent import DENT as DENT
from lightning_rob.defenses.ensemble import Ensemble as Ensemble
from lightning_rob.defenses.ensemble import Mixture as Mixture
from lightning_rob.defenses.ensemble import first_member as first_member
from lightning_rob.defenses.random_transforms import RandomTransforms as RandomTransforms
from lightning_rob.defenses.random_transforms import random_transforms_in as random_transforms_in
from lightning_rob.defenses.rmc import RMC as RMC
from lightning_rob.defenses.smoothing import Smoothing as Smoothing
from lightning_rob.defenses.smoothing import is_smoothing as is_smoothing
from lightning_rob.defenses.tadv import TADV as TADV
from lightning_rob.defenses.transform_ensemble import TransformEnsemble as TransformEnsemble
from lightning_rob.defenses.transform_ensemble import is_transform_ensemble as is_transform_ensemble
from lightning_rob.defenses.urejectron import URejectron as URejectron
