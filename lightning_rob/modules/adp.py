"""Adaptive diversity promoting training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lightning_rob.modules.joint import JointTraining

OFFSET = 1e-6  # the authors' addition to the Gram matrix, so that its determinant is not zero


def adp(logits: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """The regulariser alpha * entropy of the mean prediction + beta * log ensemble diversity.

    The ensemble diversity is det(M^T M): the squared volume that the members' predictions span,
    each without the true class and of unit 2-norm (Pang et al. 2019, section 3). All is computed
    from logits, because the small probabilities of a confident network round to zero.

    Args:
        logits: [M, B, K] of the members.
        y: [B] labels.
        alpha: weight of the entropy.
        beta: weight of the diversity.

    Returns:
        [B], to be made large.
    """
    logits = logits.float() if logits.itemsize < 4 else logits
    log_mean = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    entropy = -(log_mean.exp() * log_mean).sum(-1)
    wrong = ~one_hot(y, logits.shape[-1]).bool()
    others = logits[:, wrong].view(*logits.shape[:2], -1)
    rows = (others - (2 * others).logsumexp(-1, keepdim=True) / 2).exp()
    gram = (rows[:, None] * rows[None]).sum(-1).movedim(-1, 0)
    shifted = gram + OFFSET * torch.eye(len(rows)).to(gram)
    return alpha * entropy + beta * torch.logdet(shifted)


class ADP(JointTraining):
    """Adaptive diversity promoting (Pang et al. 2019): members disagree on the wrong classes.

    The loss is the sum of the members' cross-entropies less `adp`. Diversity has room for K - 1
    members at most.

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        alpha: weight of the entropy of the mean prediction; the paper uses 2.
        beta: weight of the log ensemble diversity; the paper uses 0.5.
        **options: those of `JointTraining`.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        alpha: float = 2.0,
        beta: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        self.alpha, self.beta = alpha, beta

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum of the members' cross-entropies less the regulariser, averaged over images."""
        logits = self.defense.logits(self.attacked(x, y))
        losses = self.member_losses(logits, y).sum(0)
        return (losses - adp(logits, y, self.alpha, self.beta)).mean()
