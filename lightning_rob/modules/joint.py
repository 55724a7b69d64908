"""Base class of methods that train all members of an ensemble together."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import Attack
from lightning_rob.defenses import Ensemble
from lightning_rob.defenses.network import network_logits
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights
from lightning_rob.objectives import check_labels, cross_entropy


def new_members(
    net: Callable[[], nn.Module], count: int, checkpoints: list[str | None] | None = None
) -> nn.ModuleList:
    """Return `count` new networks to train, with the weights of their checkpoints, if any."""
    members = nn.ModuleList(net() for _ in range(count))
    checkpoints = checkpoints or [None] * count
    if len(checkpoints) != count:
        raise ValueError(f"checkpoints must be one per member, path or null: {checkpoints}")
    for member, path in zip(members, checkpoints, strict=True):
        if path is not None:
            load_weights(member, path)
    return members


def losses_and_gradients(
    members: Iterable[nn.Module], x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return M members' cross-entropies [M, B] and their gradients [M, B, C * H * W] by the images.

    The images [B, C, H, W] require a gradient; the gradients can be differentiated again.
    """
    losses, gradients = [], []
    for member in members:
        logits = network_logits(member, x)
        check_labels(y, logits.shape[-1])
        losses.append(cross_entropy(logits, y))
        (gradient,) = torch.autograd.grad(losses[-1].sum(), x, create_graph=True)
        gradients.append(gradient.flatten(1))
    return torch.stack(losses), torch.stack(gradients)


def cosines(gradients: Tensor) -> Tensor:
    """Return the cosine of each pair of members' gradients: [M, B, D] -> [M (M - 1) / 2, B]."""
    # A confident network has tiny gradients, whose squares would underflow: first scale the largest
    # entry to 1.
    largest = gradients.detach().abs().amax(-1, keepdim=True)
    # A gradient of exactly zero has no direction, and is a constant: its slope would be infinite.
    scaled = torch.where(largest == 0, 0.0, gradients / largest.where(largest != 0, 1.0))
    directions = nn.functional.normalize(scaled, dim=-1)
    a, b = torch.triu_indices(len(gradients), len(gradients), offset=1)
    return (directions[a] * directions[b]).sum(-1)


class JointTraining(RobustModule):
    """Train M members with one optimizer and a loss over all of them.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        members: number of members M, at least 2.
        probs: M sampling probabilities of the defense, which training ignores; None means equal
            ones.
        attack: train on its adversarial images of the ensemble; None trains on clean images.
        checkpoints: weights that members start from, one path or null per member.
        **options: arguments of `RobustModule`.
    """

    defense: Ensemble

    def __init__(
        self,
        net: Callable[[], nn.Module],
        members: int = 3,
        probs: list[float] | None = None,
        attack: Attack | None = None,
        checkpoints: list[str | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if members < 2:
            raise ValueError(f"members must be at least 2 to be trained jointly, got {members}")
        self.defense = Ensemble(new_members(net, members, checkpoints), probs)
        self.attack = attack

    @property
    def members(self) -> list[nn.Module]:
        """Return the M networks."""
        return self.defense.classifiers

    def attacked(self, x: Tensor, y: Tensor) -> Tensor:
        """Return adversarial images of the ensemble, or x itself without an attack."""
        return x if self.attack is None else self.attack(self.defense, x, y, self.noise)
