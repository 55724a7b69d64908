"""Metrics: a function each, and its torchmetrics twin."""

from lightning_rob.metrics.intervals import student, wilson
from lightning_rob.metrics.per_image import PerImage, minimum
from lightning_rob.metrics.robust_accuracy import RobustAccuracy, robust_accuracy
from lightning_rob.metrics.transfer_matrix import TransferMatrix, transfer_matrix

__all__ = [
    "PerImage",
    "RobustAccuracy",
    "TransferMatrix",
    "minimum",
    "robust_accuracy",
    "student",
    "transfer_matrix",
    "wilson",
]
