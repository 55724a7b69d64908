"""Evaluation of a defense under attacks, without Lightning."""

from lightning_rob.attacks import Auto, NoAttack
from lightning_rob.evaluation.corruptions import (
    common_corruptions,
    corruption_errors,
    corruption_table,
)
from lightning_rob.evaluation.evaluate import evaluate
from lightning_rob.evaluation.evaluator import EvaluationSettings, Evaluator
from lightning_rob.evaluation.groups import GROUP_SIZE, canonical_groups, group_loader, serves_once
from lightning_rob.evaluation.overfitting import Overfitting
from lightning_rob.evaluation.protocol import AttackerDefenderSession, RoundProtocol
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.evaluation.sampling import OptimalSampling, optimal_sampling
from lightning_rob.evaluation.worst import Worst, is_random, worst_case

__all__ = [
    "GROUP_SIZE",
    "AttackerDefenderSession",
    "Auto",
    "EvaluationResult",
    "EvaluationSettings",
    "Evaluator",
    "NoAttack",
    "OptimalSampling",
    "Overfitting",
    "RoundProtocol",
    "Worst",
    "canonical_groups",
    "common_corruptions",
    "corruption_errors",
    "corruption_table",
    "evaluate",
    "group_loader",
    "is_random",
    "optimal_sampling",
    "serves_once",
    "worst_case",
]
