"""The errors of a classifier that may refuse to answer."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

Per = Literal["image", "answer"]
NAMES = ("rejected_clean", "rejected", "error")


def selective_error(
    answers: Tensor, y: Tensor, clean: Tensor, per: Per = "image"
) -> tuple[Tensor, Tensor, Tensor]:
    """The two errors of selective classification (Chen et al. 2022, eq. 1), and rejection on x~.

    Args:
        answers: [B, K] probability of each answer on x~; a row of zeros is a rejection.
        y: [B] labels.
        clean: [B] which images of x~ are the clean ones, z.
        per: what the error is a share of: "image" is all of x~, as the text has it; "answer" is
            what is accepted, as the authors' code has it, and 0 where nothing is.

    Returns:
        Scalars in float64: the share of z that is rejected, the share of x~ that is, and the
        error, answers that are wrong. Without images they are NaN.

    Raises:
        ValueError: `per` is neither, or `clean` is not a [B] mask.
    """
    _check(per)
    return _errors(*_sums(answers, y, clean), per)


def _check(per: str) -> None:
    if per not in get_args(Per):
        raise ValueError(f"per must be of {get_args(Per)}, got {per!r}")


def _sums(answers: Tensor, y: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Of z rejected, of x~ rejected, of x~ wrong: [3] float64; the images in z and x~: [2]."""
    if clean.dtype != torch.bool or clean.shape != y.shape:
        raise ValueError(
            f"clean must be a mask of {len(y)} images, got {clean.dtype} {list(clean.shape)}"
        )
    right = answers.gather(1, y[:, None])[:, 0].double()
    answered = answers.double().sum(1)
    refused = 1 - answered
    sums = torch.stack([refused[clean].sum(), refused.sum(), (answered - right).sum()])
    return sums, torch.stack([clean.sum(), torch.ones_like(clean).sum()])


def _errors(sums: Tensor, counts: Tensor, per: Per) -> tuple[Tensor, Tensor, Tensor]:
    refused_clean, refused, wrong = sums
    answered = counts[1] - refused
    share = wrong / counts[1]
    if per == "answer":
        share = torch.where(answered > 0, wrong / answered, share * 0)
    return refused_clean / counts[0], refused / counts[1], share


class SelectiveError(Metric):
    """`selective_error` over all batches and processes.

    Args:
        per: what the error is a share of, see `selective_error`.

    Raises:
        ValueError: `per` is neither "image" nor "answer".
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(self, per: Per = "image", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _check(per)
        self.per: Per = per
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, answers: Tensor, y: Tensor, clean: Tensor) -> None:
        """Add a batch: answers [B, K], labels [B], which images are clean [B]."""
        sums, counts = _sums(answers, y, clean)
        self.sums += sums
        self.counts += counts

    def compute(self) -> dict[str, Tensor]:
        """The three shares, named rejected_clean, rejected and error."""
        return dict(zip(NAMES, _errors(self.sums, self.counts, self.per), strict=True))


def rejection_curves(
    scores: Tensor,
    wrong: Tensor,
    clean: Tensor,
    thresholds: Tensor | None = None,
    per: Per = "image",
) -> tuple[Tensor, Tensor, Tensor]:
    """The errors of `selective_error` by the threshold above which an image is rejected.

    Args:
        scores: [B] of each image of x~, the larger the less like a training image.
        wrong: [B] whether the classifier is wrong on it, or with what probability.
        clean: [B] which images of x~ are the clean ones, z.
        thresholds: [T]; None: 100 from 0 to 1, as in Fig. 1 of Chen et al. (2022).
        per: what the error is a share of, see `selective_error`.

    Returns:
        Each [T] in float64: the share of z that is rejected, the share of x~, the error.

    Raises:
        ValueError: `per` is neither "image" nor "answer".
    """
    _check(per)
    if thresholds is None:
        thresholds = torch.linspace(0, 1, 100, dtype=torch.float64)
    limits = thresholds.to(scores.device).double()
    accepted = (scores.double() <= limits[:, None]).double()
    of_clean, of_all = clean.double(), torch.ones_like(scores, dtype=torch.float64)
    refused = [(1 - accepted) @ kind for kind in (of_clean, of_all)]
    sums = torch.stack([*refused, accepted @ wrong.double()])
    counts = torch.stack([clean.sum(), torch.ones_like(clean).sum()])
    return _errors(sums, counts, per)
