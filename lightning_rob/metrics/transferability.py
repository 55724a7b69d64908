"""How many of the images that fool one member of an ensemble fool another one too."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_rob.metrics.transfer_matrix import check_members, right


class Transfer(NamedTuple):
    """Transferability between the members of an ensemble.

    Args:
        matrix: [M, M] float64, by [source, target] the share of the images that fool the source,
            which they attack, that fool the target too; nan where there are none.
        counts: [M] float64, how many images fool the source that they attack.
    """

    matrix: Tensor
    counts: Tensor


def transferability(answers: Tensor, y: Tensor) -> Transfer:
    """Transferability of adversarial images (Liao et al. 2020, Table 3).

    Members that answer by chance are taken to draw independently of each other, and the figures
    are expectations then. An image that fools the source by a draw fools it by that very draw: the
    diagonal is 1.

    Args:
        answers: [M, M, B, K], by [i, j] the probability of each answer of member i to the images
            that attack member j alone, as for `transfer_matrix`; the entries of the result are the
            other way round.
        y: [B] labels.

    Returns:
        The shares and what they are shares of.
    """
    return _shares(_both(answers, y).sum(-1))


def transfer_ranking(accuracy: Tensor) -> list[int]:
    """Members by how well attacks on them transfer (Liao et al. 2020, Algorithm 2).

    Ranked by the mean accuracy of the other members on images that attack a member, the lowest
    first, ties by order. Line 8 of the algorithm scores the member on its own images, which says
    how weak it is; the text, and the sense, is the accuracy of the others.

    Args:
        accuracy: [M, M] entry [i, j] is the accuracy of member i on images that attack member j,
            as of `transfer_matrix`.

    Returns:
        The M members, the most transferable first.

    Raises:
        ValueError: not a square of numbers.
    """
    if accuracy.dim() != 2 or len(accuracy) != accuracy.shape[1] or accuracy.isnan().any():
        raise ValueError(f"accuracy must be [M, M] and known, got {accuracy.tolist()}")
    others = accuracy.double().masked_fill(torch.eye(len(accuracy)).to(accuracy).bool(), 0)
    order: list[int] = others.sum(0).round(decimals=9).argsort(stable=True).tolist()
    return order


def _both(answers: Tensor, y: Tensor) -> Tensor:
    """The probability that an image fools source and target: [M, M, B, K] -> [M, M, B]."""
    fooled = 1 - right(answers, y)
    source = fooled.diagonal().permute(1, 0)[:, None]
    itself = torch.eye(len(fooled), dtype=torch.bool, device=fooled.device)[..., None]
    return torch.where(itself, source, source * fooled.transpose(0, 1))


def _shares(fooled: Tensor) -> Transfer:
    counts = fooled.diagonal().clone()
    return Transfer(fooled / counts[:, None], counts)


class Transferability(Metric):
    """`transferability` over all batches and processes.

    Args:
        members: M, how many members answer, and how many are attacked.
    """

    is_differentiable = False
    full_state_update = False
    fooled: Tensor

    def __init__(self, members: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.members = members
        zeros = torch.zeros(members, members, dtype=torch.float64)
        self.add_state("fooled", zeros, dist_reduce_fx="sum")

    def update(self, answers: Tensor, y: Tensor) -> None:
        """Add a batch: answers [M, M, B, K], labels [B].

        Raises:
            ValueError: the answers are of another number of members.
        """
        check_members(answers, self.members)
        self.fooled += _both(answers, y).sum(-1)

    def compute(self) -> Transfer:
        """The shares and counts over all images, without their shapes where M is 1."""
        return _shares(self.fooled)
