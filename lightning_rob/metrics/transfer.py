"""Transfer between the members of an ensemble: does an attack on one member fool another?"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rob.metrics.robust_accuracy import ImageSums, robust_accuracy


def transfer_matrix(predictions: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-robustness matrix of an ensemble (ARC paper, Fig. 10a).

    Args:
        predictions: [M, M, B, K], by [i, j] the class probabilities of member i on the images that
            attack member j alone.
        y: [B] labels.

    Returns:
        [M, M] float64: entry [i, j] is the accuracy of member i on images that attack member j. The
        diagonal is each member's robustness; a high accuracy beside it is a failure to transfer.
    """
    return robust_accuracy(predictions, y).double().mean(-1)


class Transfer(NamedTuple):
    """Transferability between the members of an ensemble.

    `matrix` [M, M] has by [source, target] the share of the images that fool the source, which they
    attack, that fool the target too, NaN if there are none; `counts` [M] the number of the former.
    """

    matrix: Tensor
    counts: Tensor


def transferability(predictions: Tensor, y: Tensor) -> Transfer:
    """Compute the transferability of adversarial images (Liao et al. 2020, Table 3).

    Random members are assumed to draw independently of each other; the results are expectations
    then. An image that fools the source by a draw fools it by that very draw: the diagonal is 1.

    Args:
        predictions: [M, M, B, K], by [i, j] the class probabilities of member i on the images that
            attack member j alone, as for `transfer_matrix`; the result is transposed to that.
    """
    return _shares(_fooled_both(predictions, y).sum(-1))


def transfer_ranking(accuracy: Tensor) -> list[int]:
    """Rank the M members by how well attacks on them transfer (Liao et al. 2020, Algorithm 2).

    The criterion is the mean accuracy, as of `transfer_matrix`, of the other members on images that
    attack a member: the lowest first, ties by order. Line 8 of the algorithm scores a member on its
    own images, which measures how weak it is; the text of the paper means the others.
    """
    others = accuracy.double().masked_fill(torch.eye(len(accuracy)).to(accuracy).bool(), 0)
    # The order of a sum changes its last digits; rounding keeps equal members in their order.
    return others.sum(0).round(decimals=9).argsort(stable=True).tolist()


def _fooled_both(predictions: Tensor, y: Tensor) -> Tensor:
    """Return the probability that an image fools source and target: [M, M, B, K] -> [M, M, B]."""
    fooled = 1 - robust_accuracy(predictions, y).double()
    source = fooled.diagonal().permute(1, 0)[:, None]
    # Two members draw independently; a member that is fooled is fooled by that very draw.
    itself = torch.eye(len(fooled), dtype=torch.bool, device=fooled.device)[..., None]
    return torch.where(itself, source, source * fooled.transpose(0, 1))


def _shares(fooled: Tensor) -> Transfer:
    counts = fooled.diagonal().clone()
    return Transfer(fooled / counts[:, None], counts)


class TransferMatrix(ImageSums):
    """`transfer_matrix` of M members over all batches and processes; see `plots.heat_map`."""

    higher_is_better = True

    def __init__(self, members: int, **kwargs: Any) -> None:
        super().__init__(members, members, **kwargs)

    def update(self, predictions: Tensor, y: Tensor) -> None:
        """Add a batch: predictions [M, M, B, K], labels [B]."""
        self.add(robust_accuracy(predictions, y))

    def compute(self) -> Tensor:
        """Return the accuracies over all images: [M, M] float64; a scalar if M is 1."""
        return self.total / self.count


class Transferability(ImageSums):
    """`transferability` of M members over all batches and processes; see `plots.heat_map`."""

    higher_is_better = False

    def __init__(self, members: int, **kwargs: Any) -> None:
        super().__init__(members, members, **kwargs)

    def update(self, predictions: Tensor, y: Tensor) -> None:
        """Add a batch: predictions [M, M, B, K], labels [B]."""
        self.add(_fooled_both(predictions, y))

    def compute(self) -> Transfer:
        """Return the shares and counts over all images; scalars if M is 1."""
        return _shares(self.total)
