"""Transferability reduced smooth (TRS) training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.modules.joint import JointTraining, cosines, losses_and_gradients
from lightning_rob.randomness import Generator
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat


def similarity(gradients: Tensor) -> Tensor:
    """Return the mean over pairs of |cos(g_a, g_b)|, L_sim in the paper: [M, B, D] -> [B]."""
    return cosines(gradients).abs().mean(0)


def roughness(gradients: Tensor) -> Tensor:
    """Return the mean over pairs of ||g_a||_2 + ||g_b||_2, L_smooth: [M, B, D] -> [B]."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=-1)
    return 2 * norms.mean(0)


class _GradientNorms(Defense):
    """Defense whose "logits" are the norms of the members' loss gradients, for PGD to maximise."""

    def __init__(self, members: Sequence[nn.Module], y: Tensor) -> None:
        super().__init__(torch.full((len(members),), 1 / len(members)), mean_probs)
        self.members = nn.ModuleList(members)
        self.labels = PerImageValues(y)

    @property
    def classifiers(self) -> list[nn.Module]:
        return list(self.members)

    @torch.enable_grad()
    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        _, gradients = losses_and_gradients(self.members, x, self.labels())
        return torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)


def roughest(
    members: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    steps: int,
    generator: Generator = None,
) -> Tensor:
    """Search by PGD for images near x with the largest loss gradients, members in eval mode.

    The `steps` start from a random point of the ball and have length 2 eps / steps; the authors
    take 6. Images [B, C, H, W], labels [B] -> [B, C, H, W].
    """
    if threat.eps == 0:
        return x
    step_size = 2 * threat.eps / steps
    # The best iterate and not the last, because the norm jumps where a ReLU switches.
    search = PGD(
        threat, steps, step_size, objective=lambda logits, *_: logits.sum((0, 2)), keep_best=True
    )
    return search(_GradientNorms(members, y), x, torch.zeros_like(y), generator)


class TRS(JointTraining):
    """Transferability reduced smooth training (Yang et al. 2021, section 4).

    The loss is the sum of the members' cross-entropies + lambda_a * `similarity` at the images +
    lambda_b * `roughness` at the `roughest` images near them; both terms differentiate the network
    twice, see `GAL` for the effect of ReLUs. The norms are per image, as in the paper's text. The
    authors' code differs: it squares the norms of the gradient of the batch's mean loss, and does
    not perturb half of the batch.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        threat: ball in which `roughest` searches; the authors use linf 0.03 for CIFAR-10 and 0.2
            for MNIST.
        similarity_weight: lambda_a; the authors use 40 for CIFAR-10.
        roughness_weight: lambda_b; the authors use 2.5 for CIFAR-10.
        initial_eps: radius of the ball in the first epoch, in pixel units; None starts with the
            full radius. The authors use 0.01 for CIFAR-10 and 0.1 for MNIST.
        growth_epochs: number of epochs in which the radius grows linearly to the full one.
        steps: number of steps of the search.
        **options: arguments of `JointTraining`.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        threat: Threat,
        similarity_weight: float = 40.0,
        roughness_weight: float = 2.5,
        initial_eps: float | None = None,
        growth_epochs: int = 0,
        steps: int = 6,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        if (initial_eps is None) != (growth_epochs < 1):
            raise ValueError(
                f"initial_eps and growth_epochs go together, got {initial_eps} and {growth_epochs}"
            )
        self.threat = threat
        self.similarity_weight, self.roughness_weight = similarity_weight, roughness_weight
        self.initial_eps, self.growth_epochs = initial_eps, growth_epochs
        self.steps = steps

    def current_threat(self) -> Threat:
        """Return the ball that is searched in the current epoch."""
        if self.initial_eps is None:
            return self.threat
        progress = min(self.current_epoch / self.growth_epochs, 1)
        eps = self.initial_eps + progress * (self.threat.eps - self.initial_eps)
        return replace(self.threat, eps=eps)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # Both terms are of gradients by the image, which training differentiates by the weights.
        x = self.attacked(x, y).detach().requires_grad_()
        losses, gradients = losses_and_gradients(self.members, x, y)
        rough_x = roughest(self.members, x, y, self.current_threat(), self.steps, self.noise)
        rough_x = rough_x.detach().requires_grad_()
        _, rough_gradients = losses_and_gradients(self.members, rough_x, y)
        loss = losses.sum(0) + self.similarity_weight * similarity(gradients)
        return (loss + self.roughness_weight * roughness(rough_gradients)).mean()
