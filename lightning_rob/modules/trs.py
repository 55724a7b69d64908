"""Transferability reduced smooth training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD
from lightning_rob.defenses import Defense
from lightning_rob.modules.joint import JointTraining, cosines, losses_and_gradients
from lightning_rob.randomness import Generator
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat


def similarity(gradients: Tensor) -> Tensor:
    """The mean over pairs of |cos(g_a, g_b)|, L_sim in the paper: [M, B, D] -> [B]."""
    return cosines(gradients).abs().mean(0)


def roughness(gradients: Tensor) -> Tensor:
    """The mean over pairs of ||g_a||_2 + ||g_b||_2, L_smooth in the paper: [M, B, D] -> [B]."""
    return 2 * _lengths(gradients).mean(0)


def _lengths(gradients: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(gradients, dim=-1)
    return lengths


class _Slopes(Defense):
    """The members as PGD sees them here: their "logits" are the norms of their loss gradients."""

    def __init__(self, members: Sequence[nn.Module], y: Tensor) -> None:
        super().__init__(torch.full((len(members),), 1 / len(members)), mean_probs)
        self.members = nn.ModuleList(members)
        self.y = y

    @property
    def classifiers(self) -> list[nn.Module]:
        return list(self.members)

    @torch.enable_grad()
    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        _, gradients = losses_and_gradients(self.members, x, self.y)
        return _lengths(gradients).unsqueeze(-1)


def _steepness(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    return logits.sum((0, 2))


def roughest(
    members: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    steps: int,
    generator: Generator = None,
) -> Tensor:
    """The images near x where the members' loss gradients are longest, found by PGD in eval mode.

    Args:
        members: M networks [B, C, H, W] -> [B, K].
        x: [B, C, H, W] images.
        y: [B] labels.
        threat: where to search.
        steps: of PGD from a random start, each of 2 / steps of the radius; the authors take 6. The
            best iterate counts, for the norm jumps where a ReLU goes on or off.
        generator: where the random start comes from.

    Returns:
        [B, C, H, W].
    """
    if threat.eps == 0:
        return x
    size = 2 * threat.eps / steps
    search = PGD(threat, steps, size, objective=_steepness, keep_best=True)
    return search(_Slopes(members, y), x, torch.zeros_like(y), generator)


class TRS(JointTraining):
    """Transferability reduced smooth training (Yang et al. 2021, section 4).

    The loss is the sum of the members' cross-entropies + lambda_a * `similarity` at the images +
    lambda_b * `roughness` at the `roughest` images near them; both gradients are differentiated
    again. The norms are those of the paper's text, of single images; the authors' code squares
    those of the batch's mean loss, and leaves half of the batch where it is. `GAL` tells what ReLUs
    mean for the second derivative.

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        threat: the ball to search for rough places; the authors use linf 0.03 for CIFAR-10, 0.2 for
            MNIST.
        similarity_weight: lambda_a; the authors use 40 for CIFAR-10.
        roughness_weight: lambda_b; the authors use 2.5 for CIFAR-10.
        initial_eps: radius of the ball in the first epoch, in pixel units; None starts with the
            whole one. The authors use 0.01 for CIFAR-10, 0.1 for MNIST.
        growth_epochs: in how many epochs the radius grows from there to the whole.
        steps: of the search.
        **options: those of `JointTraining`.

    Raises:
        ValueError: an initial radius without epochs to grow in, or the reverse.
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
        """The ball of this epoch."""
        if self.initial_eps is None:
            return self.threat
        share = min(self.current_epoch / self.growth_epochs, 1)
        return replace(
            self.threat, eps=self.initial_eps + share * (self.threat.eps - self.initial_eps)
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropies of all members, similarity and roughness, averaged over images."""
        x = self.attacked(x, y).detach().requires_grad_()
        losses, gradients = losses_and_gradients(self.members, x, y)
        rough = roughest(self.members, x, y, self.current_threat(), self.steps, self.noise)
        _, steep = losses_and_gradients(self.members, rough.detach().requires_grad_(), y)
        penalty = self.similarity_weight * similarity(gradients)
        return (losses.sum(0) + penalty + self.roughness_weight * roughness(steep)).mean()
