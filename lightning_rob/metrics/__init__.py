"""Metrics: a function each, and its torchmetrics twin."""

from lightning_rob.metrics.intervals import student, wilson
from lightning_rob.metrics.per_image import PerImage
from lightning_rob.metrics.robust_accuracy import RobustAccuracy, robust_accuracy

__all__ = ["PerImage", "RobustAccuracy", "robust_accuracy", "student", "wilson"]
