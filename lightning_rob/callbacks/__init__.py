"""Callbacks that attack the module at validation and test, and guard the run."""

from lightning_rob.callbacks.audit import RobustAudit
from lightning_rob.callbacks.certified_eval import CertifiedEval
from lightning_rob.callbacks.checkpoint import RobustCheckpoint, RobustEarlyStopping
from lightning_rob.callbacks.corruption_eval import CorruptionEval
from lightning_rob.callbacks.cross_eval import TransferMatrixEval
from lightning_rob.callbacks.gallery import Gallery
from lightning_rob.callbacks.guard import TerminateOnNonFinite
from lightning_rob.callbacks.robust_eval import RobustEval
from lightning_rob.callbacks.votes import VotingRuleEval

__all__ = [
    "CertifiedEval",
    "CorruptionEval",
    "Gallery",
    "RobustAudit",
    "RobustCheckpoint",
    "RobustEarlyStopping",
    "RobustEval",
    "TerminateOnNonFinite",
    "TransferMatrixEval",
    "VotingRuleEval",
]
