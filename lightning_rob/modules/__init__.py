"""Training methods, each a LightningModule."""

from lightning_rob.modules.adp import ADP
from lightning_rob.modules.assembled import Assembled
from lightning_rob.modules.at import AdversarialTraining
from lightning_rob.modules.dann import DANN
from lightning_rob.modules.dverge import DVERGE
from lightning_rob.modules.free import FreeTraining
from lightning_rob.modules.gal import GAL
from lightning_rob.modules.joint import JointTraining
from lightning_rob.modules.robust_module import RobustModule
from lightning_rob.modules.staged import BAT, IAT, StagedTraining
from lightning_rob.modules.tadv import TADV
from lightning_rob.modules.transform_training import TransformTraining
from lightning_rob.modules.trs import TRS

__all__ = [
    "ADP",
    "BAT",
    "DANN",
    "DVERGE",
    "GAL",
    "IAT",
    "TADV",
    "TRS",
    "AdversarialTraining",
    "Assembled",
    "FreeTraining",
    "JointTraining",
    "RobustModule",
    "StagedTraining",
    "TransformTraining",
]
