"""Callbacks that watch robustness."""

from lightning_rob.callbacks.audit import RobustAudit
from lightning_rob.callbacks.cross_eval import CrossEval
from lightning_rob.callbacks.gallery import Gallery
from lightning_rob.callbacks.game import Game
from lightning_rob.callbacks.guard import Guard
from lightning_rob.callbacks.robust_checkpoint import RobustCheckpoint, RobustEarlyStopping
from lightning_rob.callbacks.robust_eval import RobustEval
from lightning_rob.callbacks.votes import Votes

__all__ = [
    "CrossEval",
    "Gallery",
    "Game",
    "Guard",
    "RobustAudit",
    "RobustCheckpoint",
    "RobustEarlyStopping",
    "RobustEval",
    "Votes",
]
