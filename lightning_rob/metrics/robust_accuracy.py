"""The accuracy of a system that may predict at random."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def robust_accuracy(predictions: Tensor, y: Tensor) -> Tensor:
    """Compute the probability [B] that the prediction [B, K] of a defense is the label [B].

    It is 0 or 1, or between the two for a randomized ensemble; 0 if the prediction is non-finite.
    """
    return label_probability(predictions, y).nan_to_num(0.0, 0.0, 0.0)


def label_probability(predictions: Tensor, y: Tensor) -> Tensor:
    """Return what predictions [..., B, K] give the labels [B]: [..., B]."""
    if predictions.dim() < 2 or y.shape != predictions.shape[-2:-1]:
        raise ValueError(
            "predictions [..., B, K] need labels [B], got "
            f"{list(predictions.shape)} and {list(y.shape)}"
        )
    labels = y.expand(predictions.shape[:-1]).unsqueeze(-1)
    return predictions.gather(-1, labels).squeeze(-1)


class ImageSums(Metric):
    """Sums over images, of numbers in the given shape, and the number of images."""

    is_differentiable = False
    full_state_update = False
    plot_lower_bound = 0.0
    total: Tensor
    count: Tensor

    def __init__(self, *shape: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # In float32 the sum over millions of images would stop growing.
        self.add_state("total", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Add the numbers of a batch: [..., B]."""
        self.total += values.double().sum(-1)
        self.count += values.shape[-1]

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw a result, or several in a row; see `torchmetrics.Metric.plot`."""
        return self._plot(val, ax)


class RobustAccuracy(ImageSums):
    """The mean of `robust_accuracy`: exact expectation for a randomized ensemble, 0/1 else."""

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def update(self, predictions: Tensor, y: Tensor) -> None:
        """Add a batch: predictions [B, K], labels [B]."""
        self.add(robust_accuracy(predictions, y))

    def compute(self) -> Tensor:
        """Return the mean over all images."""
        return (self.total / self.count).float()
