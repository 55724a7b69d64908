"""Training methods, each a LightningModule."""

from lightning_rob.modules.adp import ADP
from lightning_rob.modules.at import AdversarialTraining
from lightning_rob.modules.base import RobustModule
from lightning_rob.modules.bat import BARRE, BAT, IAT, SequentialTraining
from lightning_rob.modules.dverge import DVERGE
from lightning_rob.modules.free import FreeTraining
from lightning_rob.modules.gal import GAL
from lightning_rob.modules.joint import JointTraining
from lightning_rob.modules.pretrained import PretrainedEnsemble
from lightning_rob.modules.transductive import DANN, TADV
from lightning_rob.modules.transform_training import TransformTraining
from lightning_rob.modules.trs import TRS

__all__ = [
    "ADP",
    "BARRE",
    "BAT",
    "DANN",
    "DVERGE",
    "GAL",
    "IAT",
    "TADV",
    "TRS",
    "AdversarialTraining",
    "FreeTraining",
    "JointTraining",
    "PretrainedEnsemble",
    "RobustModule",
    "SequentialTraining",
    "TransformTraining",
]
