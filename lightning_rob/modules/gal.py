"""Diversity training with the gradient alignment loss (GAL)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_rob.modules.joint import JointTraining, cosines, losses_and_gradients


def gal(gradients: Tensor) -> Tensor:
    """Compute the gradient alignment loss log(sum over pairs a < b of exp(cos(g_a, g_b))).

    It approximates the largest cosine of two members' gradients with respect to the image
    (Kariyappa and Qureshi 2019, section 4): [M, B, D] -> [B].
    """
    return cosines(gradients).logsumexp(0)


class GAL(JointTraining):
    """Diversity training (Kariyappa and Qureshi 2019): keep the members' loss gradients apart.

    The loss is the mean of the members' cross-entropies plus `strength` times `gal`. Its gradient
    differentiates the network twice. The second derivative of a ReLU is zero, so that the alignment
    term trains only weights of active units. The paper therefore uses networks with LeakyReLU,
    whose units are always active, such as `SmallCNN(slope=0.1)`.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        strength: weight of the alignment term, lambda in the paper, which uses 0.5.
        **options: arguments of `JointTraining`.
    """

    def __init__(self, net: Callable[[], nn.Module], strength: float = 0.5, **options: Any) -> None:
        super().__init__(net, **options)
        self.strength = strength

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.attacked(x, y).detach().requires_grad_()
        losses, gradients = losses_and_gradients(self.members, x, y)
        return (losses.mean(0) + self.strength * gal(gradients)).mean()
