"""Metrics: functions of tensors, each with its torchmetrics twin."""

from lightning_rob.comparisons import holm as holm
from lightning_rob.metrics.corruption_error import ALEXNET_ERRORS as ALEXNET_ERRORS
from lightning_rob.metrics.corruption_error import corruption_error as corruption_error
from lightning_rob.metrics.gradient_spread import GradientSpread as GradientSpread
from lightning_rob.metrics.gradient_spread import gradient_spread as gradient_spread
from lightning_rob.metrics.intervals import Paired as Paired
from lightning_rob.metrics.intervals import clopper_pearson as clopper_pearson
from lightning_rob.metrics.intervals import mcnemar as mcnemar
from lightning_rob.metrics.intervals import paired as paired
from lightning_rob.metrics.intervals import paired_p as paired_p
from lightning_rob.metrics.intervals import student as student
from lightning_rob.metrics.intervals import wilson as wilson
from lightning_rob.metrics.intervals import wilson_over_draws as wilson_over_draws
from lightning_rob.metrics.per_image import PerImage as PerImage
from lightning_rob.metrics.robust_accuracy import RobustAccuracy as RobustAccuracy
from lightning_rob.metrics.robust_accuracy import robust_accuracy as robust_accuracy
from lightning_rob.metrics.selective import SelectiveError as SelectiveError
from lightning_rob.metrics.selective import rejection_curves as rejection_curves
from lightning_rob.metrics.selective import selective_error as selective_error
from lightning_rob.metrics.transfer import Transfer as Transfer
from lightning_rob.metrics.transfer import Transferability as Transferability
from lightning_rob.metrics.transfer import TransferMatrix as TransferMatrix
from lightning_rob.metrics.transfer import transfer_matrix as transfer_matrix
from lightning_rob.metrics.transfer import transfer_ranking as transfer_ranking
from lightning_rob.metrics.transfer import transferability as transferability
