"""Diversity training with the gradient alignment loss."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_rob.modules.joint import JointTraining, cosines, losses_and_gradients


def gal(gradients: Tensor) -> Tensor:
    """The gradient alignment loss, log of the sum over pairs a < b of exp(cos(g_a, g_b)).

    A smooth stand-in for the largest cosine of two members (Kariyappa and Qureshi 2019, section 4).

    Args:
        gradients: [M, B, D] of each member's loss by the image.

    Returns:
        [B].
    """
    return cosines(gradients).logsumexp(0)


class GAL(JointTraining):
    """Diversity training (Kariyappa and Qureshi 2019): members whose loss gradients do not align.

    The loss is the mean of the members' cross-entropies plus `strength` times `gal`, whose descent
    differentiates the network twice. The second derivative of a ReLU is zero: the alignment teaches
    the weights only along the units that are on. The paper therefore trains networks with
    LeakyReLU, in which no unit is off.

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        strength: weight of the alignment, lambda in the paper, which uses 0.5.
        **options: those of `JointTraining`.
    """

    def __init__(self, net: Callable[[], nn.Module], strength: float = 0.5, **options: Any) -> None:
        super().__init__(net, **options)
        self.strength = strength

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of the members plus their gradients' alignment, over the images."""
        x = self.attacked(x, y).detach().requires_grad_()
        losses, gradients = losses_and_gradients(self.members, x, y)
        return (losses.mean(0) + self.strength * gal(gradients)).mean()
