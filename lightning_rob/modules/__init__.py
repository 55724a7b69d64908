"""Training methods, each a LightningModule."""

from lightning_rob.modules.at import AdversarialTraining
from lightning_rob.modules.robust_module import RobustModule
from lightning_rob.modules.staged import BAT, IAT, StagedTraining

__all__ = ["BAT", "IAT", "AdversarialTraining", "RobustModule", "StagedTraining"]
