"""Callbacks that attack the module at validation and test, and guard the run."""

from lightning_rob.callbacks.audit import RobustAudit as RobustAudit
from lightning_rob.callbacks.certified_eval import CertifiedEval as CertifiedEval
from lightning_rob.callbacks.checkpoint import RobustCheckpoint as RobustCheckpoint
from lightning_rob.callbacks.checkpoint import RobustEarlyStopping as RobustEarlyStopping
from lightning_rob.callbacks.corruption_eval import CorruptionEval as CorruptionEval
from lightning_rob.callbacks.cross_eval import TransferMatrixEval as TransferMatrixEval
from lightning_rob.callbacks.gallery import Gallery as Gallery
from lightning_rob.callbacks.guard import TerminateOnNonFinite as TerminateOnNonFinite
from lightning_rob.callbacks.robust_eval import RobustEval as RobustEval
from lightning_rob.callbacks.votes import VotingRuleEval as VotingRuleEval
