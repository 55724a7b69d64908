"""Metrics: a function each, and its torchmetrics twin."""

from lightning_rob.metrics.intervals import student, wilson
from lightning_rob.metrics.per_image import PerImage, minimum
from lightning_rob.metrics.robust_accuracy import RobustAccuracy, robust_accuracy

__all__ = ["PerImage", "RobustAccuracy", "minimum", "robust_accuracy", "student", "wilson"]
