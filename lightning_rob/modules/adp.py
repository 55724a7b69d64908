"""Adaptive diversity promoting (ADP) training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lightning_rob.modules.joint import JointTraining
from lightning_rob.objectives import check_labels, cross_entropy

OFFSET = 1e-6  # the authors add it to the diagonal of the Gram matrix, which may be singular


def adp(logits: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """Compute the regulariser alpha * entropy of the mean prediction + beta * log diversity.

    The ensemble diversity is det(M^T M): the squared volume spanned by the members' predictions,
    each without the true class and of unit 2-norm (Pang et al. 2019, section 3). Training
    maximises the result: logits [M, B, K] and labels [B] -> [B].
    """
    # All from logits, because the small probabilities of a confident network round to zero.
    logits = logits.float() if logits.itemsize < 4 else logits
    log_mean = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    entropy = -(log_mean.exp() * log_mean).sum(-1)
    is_wrong = ~one_hot(y, logits.shape[-1]).bool()
    wrong_logits = logits[:, is_wrong].view(*logits.shape[:2], -1)
    # Softmax without the true class, divided by its 2-norm: the softmax's denominator cancels.
    directions = (wrong_logits - (2 * wrong_logits).logsumexp(-1, keepdim=True) / 2).exp()
    gram = (directions[:, None] * directions[None]).sum(-1).movedim(-1, 0)  # [B, M, M]
    shifted = gram + OFFSET * torch.eye(len(directions)).to(gram)
    return alpha * entropy + beta * torch.logdet(shifted)


class ADP(JointTraining):
    """Adaptive diversity promoting training (Pang et al. 2019).

    Members are trained to disagree on the wrong classes: the loss is the sum of their
    cross-entropies minus `adp`. At most K - 1 members can be diverse.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        alpha: weight of the entropy of the mean prediction; the paper uses 2.
        beta: weight of the log ensemble diversity; the paper uses 0.5.
        **options: arguments of `JointTraining`.
    """

    def __init__(
        self, net: Callable[[], nn.Module], alpha: float = 2.0, beta: float = 0.5, **options: Any
    ) -> None:
        super().__init__(net, **options)
        self.alpha, self.beta = alpha, beta

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.defense.logits(self.attacked(x, y))
        check_labels(y, logits.shape[-1])
        losses = cross_entropy(logits, y).sum(0)
        return (losses - adp(logits, y, self.alpha, self.beta)).mean()
