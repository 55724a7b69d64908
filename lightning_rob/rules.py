"""Rules that turn the draws of a defense into a prediction.

Each rule maps logits [S, B, K] and weights [S] to [B, K]: the probability that the system predicts
each class. If the rule is declared by `abstaining`, a row may sum to less than one, and the rest is
the probability of a rejection. In a vote a draw with NaN logits does not count, nor does one whose
largest logit is infinite. In a mean one such draw leaves no class: the row is zero.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Rule = Callable[[Tensor, Tensor], Tensor]
Declared = TypeVar("Declared", bound=Rule)
ROUNDING = 1e-5  # by which a sum of float32 probabilities may miss one


def abstaining(rule: Declared) -> Declared:
    """Declare, as a decorator, that a rule rejects an image by a row of zeros.

    An image without any finite logits gets a row of NaN: it is not rejected, but wrong.
    """

    @wraps(rule)
    def declared(logits: Tensor, weights: Tensor) -> Tensor:
        finite = logits.amax(-1).isfinite().any(0)
        return rule(logits, weights).masked_fill(~finite[..., None], torch.nan)

    declared.abstains = True  # type: ignore[attr-defined]
    return cast(Declared, declared)


def abstains(rule: Rule) -> bool:
    """Return whether the rule is declared to reject images."""
    return getattr(rule, "abstains", False)


def rejected_share(predictions: Tensor, rejects: int | None, abstained: bool) -> Tensor:
    """Return the probability [...] of a rejection in predictions [..., K].

    It is that of the class `rejects`, if there is one, and what a row lacks to one if `abstained`.
    """
    finite = predictions.isfinite().all(-1)  # else it counts as wrong
    known = predictions.where(finite[..., None], 0.0)
    share = torch.zeros_like(known[..., 0]) if rejects is None else known[..., rejects]
    if not abstained:
        return share
    # Without a rule that abstains such a row has logits that are not finite: it counts as wrong.
    missing = 1 - known.sum(-1)
    return share + torch.where(finite & (missing > ROUNDING), missing, 0.0)


def expectation(weights: Tensor, values: Tensor) -> Tensor:
    """Compute the weighted mean over draws: [S], [S, …] -> […]."""
    values = _precise(values)  # halves would round the weights
    with torch.autocast(values.device.type, enabled=False):
        mean: Tensor = torch.tensordot(weights.to(values), values, dims=1)
    return mean


def _votes(scores: Tensor) -> Tensor:
    """Return one-hots of the largest score [..., K]; zeros if it is infinite or one is NaN."""
    votes = one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
    return votes * scores.amax(-1, keepdim=True).isfinite()


def _plurality(votes: Tensor, weights: Tensor) -> Tensor:
    """Elect the class with the most weight of [S, B, K] votes; ties go to the earliest vote."""
    total = expectation(weights, votes)
    tied = total >= total.amax(-1, keepdim=True) - 1e-6  # sums of 1/S in float32 are not exact
    # The earliest draw has the largest number, so that a maximum breaks ties.
    first = torch.arange(len(votes), 0, -1, device=votes.device).to(votes)
    counts = (votes > 0) & (weights.to(votes) > 0)[:, None, None]
    tie_break = (first[:, None, None] * counts).amax(0)
    return _votes(torch.where(tied, tie_break, -1.0)) * (total.amax(-1, keepdim=True) > 0)


def random_member(logits: Tensor, weights: Tensor) -> Tensor:
    """Let one draw at random predict (randomized ensemble; "Random Defense" of Athena).

    The weights are added draw by draw: equal votes give the same number in any batch, which a
    matrix product does not promise. ARC compares these numbers.
    """
    votes = _votes(logits)
    votes = _precise(votes)
    total = torch.zeros_like(votes[0])
    for weight, vote in zip(weights.to(votes), votes, strict=True):
        total = total + weight * vote
    return total


def majority(logits: Tensor, weights: Tensor) -> Tensor:
    """Predict the class that most draws choose; ties go to the choice of the earliest draw."""
    return _plurality(_votes(logits), weights)


def top2_majority(logits: Tensor, weights: Tensor) -> Tensor:
    """Count two votes of each draw, for its two largest classes; ties go to the earliest choice."""
    return _plurality(
        torch.stack(_two_votes(logits), 1).flatten(0, 1), weights.repeat_interleave(2)
    )


def top2_majority_as_released(logits: Tensor, weights: Tensor) -> Tensor:
    """Count as `top2_majority`, with ties to the earliest second choice, as in Athena's code.

    Draws that all agree on both classes tie, so unanimity elects the second class: the reason for
    the low clean accuracy of T2MV in Liao et al. (2020).
    """
    first, second = _two_votes(logits)
    return _plurality(torch.stack((second, first), 1).flatten(0, 1), weights.repeat_interleave(2))


def _two_votes(logits: Tensor) -> tuple[Tensor, Tensor]:
    first = _votes(logits)
    second = _votes(logits.masked_fill(first > 0, -torch.inf)) * (first > 0).any(-1, keepdim=True)
    return first, second


def mean_probs(logits: Tensor, weights: Tensor) -> Tensor:
    """Predict the class of the largest mean probability; of one draw, of its largest logit."""
    if len(logits) == 1:  # a softmax rounds small differences of logits to ties
        return _votes(logits[0])
    return _votes(expectation(weights, _above_uniform(logits))).to(_precise(logits))


def _above_uniform(logits: Tensor) -> Tensor:
    """Return K times the probabilities minus 1, which keeps the digits of nearly equal ones."""
    # between two confident draws that disagree differences below float32's rounding decide
    logits = logits.float() if logits.device.type == "mps" else logits.double()
    excess = (logits - logits.amax(-1, keepdim=True)).expm1()
    mean = excess.mean(-1, keepdim=True)
    return (excess - mean) / (1 + mean)


def _precise(values: Tensor) -> Tensor:
    return values.float() if values.itemsize < 4 else values


def mean_logits(logits: Tensor, weights: Tensor) -> Tensor:
    """Predict the class of the largest mean logit."""
    return _votes(expectation(weights, logits))


# The rules in tables of votes; those of Liao et al. (2020) have the names of the paper. Without
# `top2_majority_as_released`, which predicts the second largest logit of a single draw.
VOTING_RULES: dict[str, Rule] = {
    "RD": random_member,
    "MV": majority,
    "T2MV": top2_majority,
    "AVEP": mean_probs,
    "AVEL": mean_logits,
}
