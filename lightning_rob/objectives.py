"""What an attack climbs: logits [S, B, K], weights [S] and labels [B] to one number per image.

Cross-entropy is computed as softplus of the log-odds against the label, which keeps its gradient
where softmax minus one-hot would round to zero on a confident network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rob.rules import expectation

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
Reduction = Literal["mean", "min"]
Declared = TypeVar("Declared", bound=Objective)


def reduces(reduction: Reduction) -> Callable[[Declared], Declared]:
    """Declare, as a decorator, what an objective makes of its values on single draws.

    Attacks then see the parts of a mixture one by one; `HighConfidence` takes no other objectives.

    Args:
        reduction: "mean" by the weights, or "min" of the draws that can answer.
    """

    def declared(objective: Declared) -> Declared:
        objective.reduction = reduction  # type: ignore[attr-defined]
        return objective

    return declared


def over_draws(objective: Objective) -> Reduction | None:
    """Return the objective's `reduction` over draws; None where it declares none."""
    return getattr(objective, "reduction", None)


class NonFiniteLogitsError(ValueError):
    """A defense's logits are not numbers, so that no attack can go by them.

    Args:
        images: [B] of which images.
    """

    def __init__(self, images: Tensor) -> None:
        told = f"the defense's logits are not numbers on {int(images.sum())} of {len(images)}"
        super().__init__(f"{told} images")
        self.images = images


def check_labels(y: Tensor, classes: int) -> None:
    """Raise ValueError if a label is not one of 0 … classes - 1."""
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise ValueError(
            f"labels must be 0 … {classes - 1} for {classes} classes, got "
            f"{int(y.min())} … {int(y.max())}"
        )


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Raise ValueError for labels out of range, and for logits that are not numbers.

    One draw without numbers, of logits [S, B, K], leaves the objective of all without a gradient:
    the others would look robust. So does one whose largest logit is infinite.
    """
    check_labels(y, logits.shape[-1])
    sick = ~logits.amax(-1).isfinite().all(0)
    if sick.any():
        raise NonFiniteLogitsError(sick)


def _split(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The label's logit [..., B] and all logits with the label's at minus infinity."""
    index = y.expand(logits.shape[:-1]).unsqueeze(-1)
    return logits.gather(-1, index).squeeze(-1), logits.scatter(-1, index, -torch.inf)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(logits)[y] without cancellation: [..., B, K], [B] -> [..., B]."""
    right, wrong = _split(logits, y)
    return softplus(wrong.logsumexp(-1) - right, threshold=50)


def classification_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy [B, K], [B] -> scalar; ValueError for labels out of range."""
    check_labels(y, logits.shape[-1])
    return cross_entropy(logits, y).mean()


@reduces("mean")
def expected_ce(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The mean of the draws' cross-entropies: adaptive PGD, EoT, GMSA-AVG."""
    return expectation(weights, cross_entropy(logits, y))


@reduces("min")
def worst_ce(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The smallest cross-entropy of the draws that can answer: GMSA-MIN."""
    return _least(weights, cross_entropy(logits, y))


def ce_of_mean_probs(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the mean probabilities."""
    share = weights.to(logits).log()[:, None, None]
    return cross_entropy((logits.log_softmax(-1) + share).logsumexp(0), y)


def ce_of_mean_logits(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the mean logits (ARC paper, eq. 64)."""
    return cross_entropy(expectation(weights, logits), y)


def linear(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Largest wrong logit minus the right one, on mean logits."""
    right, wrong = _split(expectation(weights, logits), y)
    return wrong.amax(-1) - right


@reduces("mean")
def expected_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The mean over draws of the largest wrong logit minus the right one ("expected h")."""
    return expectation(weights, _margin(logits, y))


@reduces("min")
def worst_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The smallest margin of the draws that can answer."""
    return _least(weights, _margin(logits, y))


@reduces("mean")
def confident(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The mean over draws of the largest probability of a wrong class."""
    return expectation(weights, _wrong_confidence(logits, y))


@reduces("min")
def min_confidence(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """The smallest, of the draws that can answer, of the largest probability of a wrong class."""
    return _least(weights, _wrong_confidence(logits, y))


@dataclass(frozen=True)
class TargetedMargin:
    """The logit of one wrong class minus the right one, of all draws.

    Args:
        shift: k, the class is y + k modulo K.
        least: the smallest of the draws that can answer, not their mean.
    """

    shift: int
    least: bool = False

    @property
    def reduction(self) -> Reduction:
        """The least of the draws, or their mean."""
        return "min" if self.least else "mean"

    def __call__(self, logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        """Logits [S, B, K], weights [S] and labels [B] to [B]."""
        pair = torch.stack((y, (y + self.shift) % logits.shape[-1]), -1)
        right, wrong = logits.gather(-1, pair.expand(*logits.shape[:-1], 2)).unbind(-1)
        reduce = _least if self.least else expectation
        return reduce(weights, wrong - right)


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    right, wrong = _split(logits, y)
    return wrong.amax(-1) - right


def _wrong_confidence(logits: Tensor, y: Tensor) -> Tensor:
    return _split(logits.softmax(-1), y)[1].amax(-1)


def _least(weights: Tensor, values: Tensor) -> Tensor:
    """The smallest over draws that can answer: [S], [S, B] -> [B]."""
    idle = (weights == 0).to(values.device)[:, None]
    return values.masked_fill(idle, torch.inf).amin(0)
