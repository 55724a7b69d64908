"""The accuracy of a system that may answer by chance."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def robust_accuracy(answers: Tensor, y: Tensor) -> Tensor:
    """The probability that the answer is right, per image.

    Args:
        answers: [B, K] probability of each answer, as a defense returns it.
        y: [B] labels.

    Returns:
        [B]: 0 or 1, or between the two for a randomized ensemble; 0 where it is not a number.
    """
    return answers.gather(1, y[:, None])[:, 0].nan_to_num(0.0, 0.0, 0.0)


class RobustAccuracy(Metric):
    """The mean of `robust_accuracy`: exact expectation for a randomized ensemble, 0/1 else."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    right: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("right", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, answers: Tensor, y: Tensor) -> None:
        """Add a batch: answers [B, K], labels [B]."""
        self.right += robust_accuracy(answers, y).double().sum()
        self.count += len(y)

    def compute(self) -> Tensor:
        """The mean over all images."""
        return (self.right / self.count).float()
