"""The errors of a classifier that may reject images."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_rob.metrics.robust_accuracy import ImageSums, robust_accuracy
from lightning_rob.rules import rejected_share

Per = Literal["image", "prediction"]
NAMES = ("rejected_clean", "rejected", "error")


def selective_error(
    predictions: Tensor, y: Tensor, clean: Tensor, per: Per = "image", rejects: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the two errors of selective classification (Chen et al. 2022, eq. 1).

    Args:
        predictions: [B, K] probability of each class on x~; a row of zeros is a rejection.
        y: [B] labels.
        clean: [B] mask of the images of x~ that are the clean ones, z.
        per: denominator of the error: "image" is all of x~, as in the paper's text; "prediction"
            is the images that are not rejected, as in the authors' code; 0 if there are none.
        rejects: class that stands for rejection, beside rows of zeros.

    Returns:
        Scalars in float64: the rejected share of z, the rejected share of x~, and the share of
        wrong predictions. Without images they are NaN.
    """
    _check(per)
    return _errors(_sums(predictions, y, clean, rejects), len(y), per)


def rejection_curves(
    scores: Tensor,
    wrong: Tensor,
    clean: Tensor,
    thresholds: Tensor | None = None,
    per: Per = "image",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the errors [T] of `selective_error` if images are rejected above a threshold.

    Args:
        scores: [B] score of each image of x~, the larger the less like a training image.
        wrong: [B] whether the classifier is wrong on it, or with which probability.
        thresholds: [T]; None: 100 from 0 to 1, as in Fig. 1 of Chen et al. (2022).
    """
    _check(per)
    if thresholds is None:
        thresholds = torch.linspace(0, 1, 100, dtype=torch.float64)
    limits = thresholds.to(scores.device).double()
    accepted = (scores.double() <= limits[:, None]).double()
    of_clean, of_all = clean.double(), torch.ones_like(scores, dtype=torch.float64)
    rejected = [(1 - accepted) @ mask for mask in (of_clean, of_all)]
    sums = [*rejected, accepted @ wrong.double(), of_clean.sum()]
    return _errors(sums, len(scores), per)


def _check(per: str) -> None:
    if per not in get_args(Per):
        raise ValueError(f"per must be of {get_args(Per)}, got {per!r}")


def _sums(predictions: Tensor, y: Tensor, clean: Tensor, rejects: int | None) -> Tensor:
    """Sum up rejections of z, rejections of x~, errors, and the images of z: [4] float64."""
    if clean.dtype != torch.bool or clean.shape != y.shape:
        raise ValueError(
            f"clean must be a mask of {len(y)} images, got {clean.dtype} {list(clean.shape)}"
        )
    correct = robust_accuracy(predictions, y).double()
    rejected = rejected_share(predictions.double(), rejects, True)
    wrong = 1 - rejected - correct
    return torch.stack([rejected[clean].sum(), rejected.sum(), wrong.sum(), clean.sum().double()])


def _errors(
    sums: Tensor | list[Tensor], images: Tensor | int, per: Per
) -> tuple[Tensor, Tensor, Tensor]:
    rejected_clean, rejected, wrong, clean = sums
    accepted = images - rejected
    # The authors' code divides by the accepted images, the paper's text by all.
    error = wrong / images
    if per == "prediction":
        error = torch.where(accepted > 0, wrong / accepted, error * 0)  # NaN without images
    return rejected_clean / clean, rejected / images, error


class SelectiveError(ImageSums):
    """`selective_error` over all batches and processes, with its `per` and `rejects`."""

    higher_is_better = False
    plot_upper_bound = 1.0

    def __init__(self, per: Per = "image", rejects: int | None = None, **kwargs: Any) -> None:
        super().__init__(4, **kwargs)
        _check(per)
        self.per: Per = per
        self.rejects = rejects

    def update(self, predictions: Tensor, y: Tensor, clean: Tensor) -> None:
        """Add a batch: predictions [B, K], labels [B], mask of the clean images [B]."""
        self.total += _sums(predictions, y, clean, self.rejects)
        self.count += len(y)

    def compute(self) -> dict[str, Tensor]:
        """Return the three shares, named rejected_clean, rejected and error."""
        return dict(zip(NAMES, _errors(self.total, self.count, self.per), strict=True))
