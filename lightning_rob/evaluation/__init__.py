"""Evaluation of a defense under attacks, without Lightning."""

from lightning_rob.attacks import Auto as Auto
from lightning_rob.attacks import NoAttack as NoAttack
from lightning_rob.evaluation.corruptions import common_corruptions as common_corruptions
from lightning_rob.evaluation.corruptions import corruption_errors as corruption_errors
from lightning_rob.evaluation.corruptions import corruption_table as corruption_table
from lightning_rob.evaluation.evaluate import evaluate as evaluate
from lightning_rob.evaluation.evaluator import EvaluationSettings as EvaluationSettings
from lightning_rob.evaluation.evaluator import Evaluator as Evaluator
from lightning_rob.evaluation.groups import GROUP_SIZE as GROUP_SIZE
from lightning_rob.evaluation.groups import canonical_groups as canonical_groups
from lightning_rob.evaluation.groups import group_loader as group_loader
from lightning_rob.evaluation.groups import serves_once as serves_once
from lightning_rob.evaluation.overfitting import Overfitting as Overfitting
from lightning_rob.evaluation.protocol import AttackerDefenderSession as AttackerDefenderSession
from lightning_rob.evaluation.protocol import RoundProtocol as RoundProtocol
from lightning_rob.evaluation.results import EvaluationResult as EvaluationResult
from lightning_rob.evaluation.sampling import OptimalSampling as OptimalSampling
from lightning_rob.evaluation.sampling import optimal_sampling as optimal_sampling
from lightning_rob.evaluation.worst import Worst as Worst
from lightning_rob.evaluation.worst import is_random as is_random
from lightning_rob.evaluation.worst import worst_case as worst_case
