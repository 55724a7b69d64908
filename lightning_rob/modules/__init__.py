"""Training methods, each a LightningModule."""

from lightning_rob.modules.adp import ADP as ADP
from lightning_rob.modules.at import AdversarialTraining as AdversarialTraining
from lightning_rob.modules.base import RobustModule as RobustModule
from lightning_rob.modules.bat import BARRE as BARRE
from lightning_rob.modules.bat import BAT as BAT
from lightning_rob.modules.bat import IAT as IAT
from lightning_rob.modules.bat import SequentialTraining as SequentialTraining
from lightning_rob.modules.dann import DANN as DANN
from lightning_rob.modules.dverge import DVERGE as DVERGE
from lightning_rob.modules.free import FreeTraining as FreeTraining
from lightning_rob.modules.gal import GAL as GAL
from lightning_rob.modules.joint import JointTraining as JointTraining
from lightning_rob.modules.pretrained import PretrainedEnsemble as PretrainedEnsemble
from lightning_rob.modules.transform_training import TransformTraining as TransformTraining
from lightning_rob.modules.trs import TRS as TRS
