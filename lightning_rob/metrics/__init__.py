"""Metrics: functions of tensors, each with its torchmetrics twin."""

from lightning_rob.comparisons import holm
from lightning_rob.metrics.corruption_error import ALEXNET_ERRORS, corruption_error
from lightning_rob.metrics.gradient_spread import GradientSpread, gradient_spread
from lightning_rob.metrics.intervals import (
    Paired,
    clopper_pearson,
    mcnemar,
    paired,
    paired_p,
    student,
    wilson,
    wilson_over_draws,
)
from lightning_rob.metrics.per_image import PerImage
from lightning_rob.metrics.robust_accuracy import RobustAccuracy, robust_accuracy
from lightning_rob.metrics.selective import SelectiveError, rejection_curves, selective_error
from lightning_rob.metrics.transfer import (
    Transfer,
    Transferability,
    TransferMatrix,
    transfer_matrix,
    transfer_ranking,
    transferability,
)

__all__ = [
    "ALEXNET_ERRORS",
    "GradientSpread",
    "Paired",
    "PerImage",
    "RobustAccuracy",
    "SelectiveError",
    "Transfer",
    "TransferMatrix",
    "Transferability",
    "clopper_pearson",
    "corruption_error",
    "gradient_spread",
    "holm",
    "mcnemar",
    "paired",
    "paired_p",
    "rejection_curves",
    "robust_accuracy",
    "selective_error",
    "student",
    "transfer_matrix",
    "transfer_ranking",
    "transferability",
    "wilson",
    "wilson_over_draws",
]
