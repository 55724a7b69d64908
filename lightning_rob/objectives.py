"""Objectives that attacks maximise: logits [S, B, K], weights [S], labels [B] -> values [B].

Cross-entropy is computed as softplus of the log-odds against the label, which keeps its gradient
where softmax minus one-hot would round to zero on a confident network.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rob.rules import (
    Rule,
    expectation,
    mean_logits,
    mean_probs,
    random_member,
    top2_majority,
)
from lightning_rob.threat import guard

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # an objective, or any such function
Reduction = Literal["mean", "min"]
DLR_GUARD = 1e-12  # added to divisors, as in the authors' code
MOST_SPREAD, VOTE_SPREAD = 8.0, 4.0  # of the three largest logits of a member
TIE = 0.5  # of a vote, for the first choice of the first member, where ties are common
PRECISE = 1e-30  # below it values and gradients lose digits in single precision, and end at zero


class Objective:
    """An objective, with what attacks use to evaluate it in parts and on confident networks.

    Args:
        reduction: how it reduces its values on single draws, "mean" with the draws' weights or
            "min" over those of positive weight. Attacks then evaluate the parts of a mixture one
            by one, in the memory of one part; `HighConfidence` accepts no other objectives.
        logarithm: its logarithm where it is small, see `climbed`.
    """

    __name__: str
    __qualname__: str

    def __init__(
        self, value: Loss, reduction: Reduction | None = None, logarithm: Loss | None = None
    ) -> None:
        self.value, self.reduction, self.logarithm = value, reduction, logarithm
        update_wrapper(self, value)  # recipes and records name it as the function
        self.__name__ = getattr(value, "__name__", repr(value))  # a partial has none

    def __call__(self, logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        """Compute the objective: [S, B, K], [S], [B] -> [B]."""
        return self.value(logits, weights, y)

    def __repr__(self) -> str:
        return self.__name__

    def __reduce__(self) -> str | tuple[Any, ...]:
        if "__qualname__" in vars(self):
            return self.__qualname__  # copied and pickled by its name, as a function
        return Objective, (self.value, self.reduction, self.logarithm)


def reduction_of(objective: Loss) -> Reduction | None:
    """Return the objective's `reduction` over draws; None if it has none."""
    return getattr(objective, "reduction", None)


def climbed(objective: Loss, logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute an objective that keeps its slope on confident networks: [S, B, K] … -> [B].

    From c = 1e-30 downwards the value v is continued by c (1 + log(v / c)), if the objective
    has a logarithm. Order, slope at c and directions of the gradient stay the same, and
    values below 1e-38, on which single precision has no slope, are as good as any.
    """
    value = objective(logits, weights, y)
    logarithm: Loss | None = getattr(objective, "logarithm", None)
    if logarithm is None:
        return value
    continued = PRECISE * (1 - math.log(PRECISE) + logarithm(logits, weights, y))
    return torch.where(value < PRECISE, continued, value)


class NonFiniteLogitsError(ValueError):
    """Report non-finite logits on `images`, a mask [B]: an attack has no gradient to follow."""

    def __init__(self, images: Tensor) -> None:
        count = f"{int(images.sum())} of {len(images)}"
        super().__init__(f"the defense's logits are not numbers on {count} images")
        self.images = images


def check_classes(classes: int) -> None:
    """Raise ValueError for a classifier of fewer than two classes."""
    if classes < 2:
        raise ValueError(
            f"a classifier needs two logits or more, got {classes}: of a single logit z make two, "
            "torch.cat([-z / 2, z / 2], 1) or torch.cat([torch.zeros_like(z), z], 1)"
        )


def check_labels(y: Tensor, classes: int) -> None:
    """Raise ValueError unless all labels [B] are in 0 … classes - 1."""
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise ValueError(
            f"labels must be 0 … {classes - 1} for {classes} classes, got "
            f"{int(y.min())} … {int(y.max())}"
        )


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Raise ValueError for labels [B] out of range and for non-finite logits [S, B, K]."""
    check_labels(y, logits.shape[-1])
    # A draw that is not finite leaves the objective of all draws without a gradient, and they would
    # look robust. A single logit of minus infinity is allowed: it rules a class out.
    nonfinite = ~logits.amax(-1).isfinite().all(0)
    if nonfinite.any():
        raise NonFiniteLogitsError(nonfinite)


def _split(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the label's logit [..., B], and all logits with the label's at minus infinity."""
    index = y.expand(logits.shape[:-1]).unsqueeze(-1)
    return logits.gather(-1, index).squeeze(-1), logits.scatter(-1, index, -torch.inf)


def _odds(logits: Tensor, y: Tensor) -> Tensor:
    """Return the log-odds against the label [..., B]: of a small cross-entropy, its logarithm."""
    right, wrong = _split(logits, y)
    return wrong.logsumexp(-1) - right


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Compute -log softmax(logits)[y] without cancellation: [..., B, K], [B] -> [..., B]."""
    return softplus(_odds(logits, y), threshold=50)


def classification_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross-entropy of [B, K] and [B]; ValueError for labels out of range."""
    check_labels(y, logits.shape[-1])
    return cross_entropy(logits, y).mean()


def boosted_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Compute MART's -log p[y] - log(1 - the largest wrong p) (Wang et al. 2020): [..., B]."""
    # 1 minus the rival's probability is the sum of all others, which has no cancellation.
    rival = _split(logits, y)[1].argmax(-1, keepdim=True)
    others = logits.scatter(-1, rival, -torch.inf)
    lead = logits.gather(-1, rival).squeeze(-1) - others.logsumexp(-1)
    return cross_entropy(logits, y) + softplus(lead, threshold=50)


def log_mean_probs(logits: Tensor, weights: Tensor) -> Tensor:
    """Compute the logarithm of the mean probabilities: [S, B, K], [S] -> [B, K]."""
    # The sum over draws has no slope where all exclude a class: its logarithm is finite here.
    floor = torch.finfo(logits.dtype).min / 4
    logs = logits.log_softmax(-1).clamp_min(floor)
    return (logs + weights.to(logits).log()[:, None, None]).logsumexp(0)


def _log_expectation(weights: Tensor, logarithms: Tensor) -> Tensor:
    if len(logarithms) == 1:
        return logarithms[0]
    return (logarithms + weights.to(logarithms).log()[:, None]).logsumexp(0)


def _min_over_draws(weights: Tensor, values: Tensor) -> Tensor:
    """Return the smallest value over draws of positive weight: [S], [S, B] -> [B]."""
    # A draw that never happens must not decide the minimum.
    never_drawn = (weights == 0).to(values.device)[:, None]
    return values.masked_fill(never_drawn, torch.inf).amin(0)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the largest wrong logit minus the label's: [..., B, K], [B] -> [..., B]."""
    right, wrong = _split(logits, y)
    return wrong.amax(-1) - right


def _wrong_confidence(logits: Tensor, y: Tensor) -> Tensor:
    return _split(logits.softmax(-1), y)[1].amax(-1)


@partial(
    Objective,
    reduction="mean",
    logarithm=lambda logits, weights, y: _log_expectation(weights, _odds(logits, y)),
)
def expected_ce(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross-entropy over draws: adaptive PGD, EoT, GMSA-AVG."""
    return expectation(weights, cross_entropy(logits, y))


@partial(
    Objective,
    reduction="min",
    logarithm=lambda logits, weights, y: _min_over_draws(weights, _odds(logits, y)),
)
def worst_ce(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the smallest cross-entropy of the draws of positive weight: GMSA-MIN."""
    return _min_over_draws(weights, cross_entropy(logits, y))


@Objective
def log_expected_ce(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the logarithm of `expected_ce`, whose gradient has its direction and no underflow."""
    odds = _odds(logits, y)
    # below e^-20 softplus is the exponential
    loss = torch.where(odds < -20, odds, softplus(odds.clamp_min(-20), threshold=50).log())
    return (loss + weights.to(logits).log()[:, None]).logsumexp(0)


@partial(Objective, logarithm=lambda logits, weights, y: _odds(log_mean_probs(logits, weights), y))
def ce_of_mean_probs(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy of the mean probabilities."""
    return cross_entropy(log_mean_probs(logits, weights), y)


@partial(Objective, logarithm=lambda logits, weights, y: _odds(expectation(weights, logits), y))
def ce_of_mean_logits(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy of the mean logits (ARC paper, eq. 64)."""
    return cross_entropy(expectation(weights, logits), y)


@Objective
def linear(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the largest wrong logit minus the label's, on mean logits."""
    return margin(expectation(weights, logits), y)


def spread(logits: Tensor) -> Tensor:
    """Return by how much the largest logit leads the third: [S, B, 1].

    Of two finite logits, 1 more than their distance: divided by it the lead would be constant.
    """
    top = logits.detach().topk(min(3, logits.shape[-1])).values
    spread = top[..., :1] - top.masked_fill(top.isneginf(), torch.inf).amin(-1, keepdim=True)
    third = (top.isfinite().sum(-1, keepdim=True) > 2) & (spread > 0)
    return torch.where(third, spread, spread + 1)


def _capped(logits: Tensor, weights: Tensor) -> Tensor:
    return log_mean_probs(logits * (MOST_SPREAD / spread(logits)).clamp_max(1), weights)


@Objective
def ce_of_capped_probs(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy of mean probabilities of members that are not too confident.

    The most confident members alone decide the slope of the mean probability. A member's logits are
    scaled down if the largest leads the third by more than 8.
    """
    return cross_entropy(_capped(logits, weights), y)


@Objective
def margin_of_capped_probs(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the largest wrong log mean probability minus the label's, capped as above."""
    return margin(_capped(logits, weights), y)


@Objective
def ce_of_votes(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy of mean probabilities of members that are equally confident.

    A vote does not depend on the scale of a member's logits; here the largest leads the third by 4.
    """
    return cross_entropy(log_mean_probs(logits * (VOTE_SPREAD / spread(logits)), weights), y)


def smoothed_votes(logits: Tensor, weights: Tensor, votes: int = 1) -> Tensor:
    """Return the mean over draws of smoothed votes for a draw's largest classes: [B, K].

    A vote is the sigmoid of 4 times the distance to the bar, in units of `spread`: to the largest
    score of the other classes, or, if each draw has two votes, to their second largest one. With
    two votes or two draws ties are common: the first choice of the first draw, which decides them,
    has half a vote more.
    """
    scores = (logits / spread(logits)).clamp_min(-1 / torch.finfo(logits.dtype).eps)
    counts = torch.zeros_like(expectation(weights, scores))
    if votes < logits.shape[-1]:  # else every class has a vote of every draw
        top = scores.topk(votes + 1).values
        last, beyond = top[..., -2:-1], top[..., -1:]
        bar = torch.where(scores >= last, beyond, last)
        counts = expectation(weights, (VOTE_SPREAD * (scores - bar)).sigmoid())
    # As tensors: to ask for the weights here would make a GPU wait at every step.
    drawn = (weights > 0).to(scores)
    ties = TIE if votes == 2 else TIE * (drawn.sum() == 2)
    decides = drawn * (drawn.cumsum(0) == 1)
    first = expectation(decides, scores)
    lead = VOTE_SPREAD * (first - first.amax(-1, keepdim=True))
    return counts + ties * (weights * decides).sum() * lead.exp()


@Objective
def margin_of_votes(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the largest share of smoothed votes of a wrong class minus the label's."""
    return margin(smoothed_votes(logits, weights), y)


@Objective
def margin_of_two_votes(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the same where each draw votes for two classes, as `top2_majority` counts them."""
    return margin(smoothed_votes(logits, weights, 2), y)


@partial(Objective, reduction="mean")
def expected_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over draws of the largest wrong logit minus the label's ("expected h")."""
    return expectation(weights, margin(logits, y))


@partial(Objective, reduction="min")
def worst_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the smallest margin of the draws of positive weight."""
    return _min_over_draws(weights, margin(logits, y))


@partial(Objective, reduction="mean")
def expected_dlr(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over draws of the difference-of-logits ratio (Croce and Hein 2020a, eq. 6).

    It is the margin divided by the distance of the largest and the third largest logit, which makes
    it independent of the logits' scale and shift.
    """
    if logits.shape[-1] < 3:
        raise ValueError(f"DLR needs three classes or more, the defense has {logits.shape[-1]}")
    top = logits.topk(3).values
    spread = top[..., 0] - top[..., 2] + guard(top, DLR_GUARD)
    return expectation(weights, margin(logits, y) / spread)


@partial(Objective, reduction="mean")
def expected_relative_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over draws of the margin divided by the norm of the logits.

    It is independent of the logits' scale, as DLR is, which two classes do not have.
    """
    size = logits.norm(dim=-1) + guard(logits, DLR_GUARD)
    return expectation(weights, margin(logits, y) / size)


def without_scale(classes: int) -> Objective:
    """Return a loss that is the same for logits of any scale."""
    return expected_dlr if classes > 2 else expected_relative_margin


def targeted_dlr(target: Tensor) -> Objective:
    """Return the targeted difference-of-logits ratio (Croce and Hein 2020a, eq. 7), over draws.

    Images climb towards the classes target [B], of at least four, else it raises ValueError.
    """

    def towards_target(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        if logits.shape[-1] < 4:
            raise ValueError(
                f"targeted DLR needs four classes or more, the defense has {logits.shape[-1]}"
            )
        right, wrong = _pair(logits, y, target)
        top = logits.topk(4).values
        # The guard is the authors': equal logits would divide by zero.
        spread = top[..., 0] - (top[..., 2] + top[..., 3]) / 2 + guard(top, DLR_GUARD)
        return expectation(weights, (wrong - right) / spread)

    return Objective(towards_target, "mean")


def _pair(logits: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack((y, target), -1).expand(*logits.shape[:-1], 2)
    right, wrong = logits.gather(-1, both).unbind(-1)
    return right, wrong


@dataclass(frozen=True)
class TargetedMargin:
    """The logit of the wrong class y + k modulo K minus the label's, reduced over draws."""

    class_offset: int  # k
    reduction: Reduction = "mean"  # "mean" with the draws' weights, "min" over positive ones

    def __call__(self, logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        """Compute the margins [B] of logits [S, B, K], weights [S] and labels [B]."""
        right, wrong = _pair(logits, y, (y + self.class_offset) % logits.shape[-1])
        reduced = _min_over_draws if self.reduction == "min" else expectation
        return reduced(weights, wrong - right)


@partial(Objective, reduction="mean")
def confident(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the mean over draws of the largest probability of a wrong class."""
    return expectation(weights, _wrong_confidence(logits, y))


@partial(Objective, reduction="min")
def min_confidence(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute the largest probability of a wrong class, smallest over draws of positive weight."""
    return _min_over_draws(weights, _wrong_confidence(logits, y))


def _log_probability_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Return the logarithm of `expected_probability_margin` where all wrong classes are small."""
    right, wrong = _split(logits, y)
    rival = wrong.amax(-1).logaddexp(wrong.logsumexp(-1)) - right
    return _log_expectation(weights, rival)


@partial(Objective, reduction="mean", logarithm=_log_probability_margin)
def expected_probability_margin(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Compute 1 + the mean over draws of the largest wrong probability minus the label's.

    The Probability Margin Attack is PGD on it (Xie et al., CVPR 2025). The 1 keeps the value and
    the gradient precise where the label's probability rounds to 1.
    """
    right, wrong = _split(logits, y)
    margin = _wrong_confidence(logits, y) + (wrong.logsumexp(-1) - right).sigmoid()
    return expectation(weights, margin)


def losses_of_rule(rule: Rule, draws: int = 2) -> tuple[Objective, Objective]:
    """Return the cross-entropy and the margin that attack a rule over this number of members.

    The expected loss goes on climbing on members that have long voted for a wrong class, and in
    mean logits one confident member hides the votes of the others.
    """
    if rule is random_member or draws == 1:
        return expected_ce, expected_margin
    if rule is mean_logits:
        return ce_of_mean_logits, linear
    if rule is mean_probs:
        return ce_of_capped_probs, margin_of_capped_probs
    return ce_of_votes, margin_of_two_votes if rule is top2_majority else margin_of_votes
