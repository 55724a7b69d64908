"""Which member of an ensemble falls for images that were made against which."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def transfer_matrix(answers: Tensor, y: Tensor) -> Tensor:
    """The cross-robustness matrix of an ensemble (ARC paper, Fig. 10a).

    Args:
        answers: [M, M, B, K], by [i, j] the probability of each answer of member i to the images
            that attack member j alone.
        y: [B] labels.

    Returns:
        [M, M] float64: entry [i, j] is the accuracy of member i on images that attack member j, so
        the diagonal is each member's robustness and the rest how far attacks fail to transfer.
    """
    return right(answers, y).mean(-1)


def right(answers: Tensor, y: Tensor) -> Tensor:
    """The probability of being right, [..., B, K] -> [..., B]."""
    labels = y.expand(answers.shape[:-1]).unsqueeze(-1)
    return answers.gather(-1, labels).squeeze(-1).double()


def check_members(answers: Tensor, members: int) -> None:
    """Raise ValueError unless answers are [M, M, B, K] of so many members."""
    if answers.shape[:2] != (members, members):
        raise ValueError(f"answers must be [{members}, {members}, B, K], got {list(answers.shape)}")


class TransferMatrix(Metric):
    """`transfer_matrix` over all batches and processes.

    Args:
        members: M, how many members answer, and how many are attacked.
    """

    is_differentiable = False
    full_state_update = False
    right: Tensor
    count: Tensor

    def __init__(self, members: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.members = members
        zeros = torch.zeros(members, members, dtype=torch.float64)
        self.add_state("right", zeros, dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, answers: Tensor, y: Tensor) -> None:
        """Add a batch: answers [M, M, B, K], labels [B].

        Raises:
            ValueError: the answers are of another number of members.
        """
        check_members(answers, self.members)
        self.right += right(answers, y).sum(-1)
        self.count += len(y)

    def compute(self) -> Tensor:
        """The accuracies over all images: [M, M] float64, without its shape where M is 1."""
        return self.right / self.count
