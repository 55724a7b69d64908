"""Ensembles whose members are trained together."""

from collections.abc import Callable, Iterable

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.attacks import Attack
from lightning_rob.defenses import Ensemble
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights
from lightning_rob.objectives import check_labels, cross_entropy


def new_members(
    net: Callable[[], nn.Module], count: int, checkpoints: list[str | None] | None = None
) -> nn.ModuleList:
    """Networks to train, each from its checkpoint if it has one.

    Args:
        net: makes a network; called once per member.
        count: M.
        checkpoints: weights to start from, one path or None per member.

    Raises:
        ValueError: not as many checkpoints as members.
    """
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
    """Each member's cross-entropy, and its gradient by the images, itself differentiable.

    Args:
        members: M networks [B, C, H, W] -> [B, K].
        x: [B, C, H, W] images that require a gradient.
        y: [B] labels.

    Returns:
        Losses [M, B] and gradients [M, B, C * H * W].

    Raises:
        ValueError: labels out of range.
    """
    losses, gradients = [], []
    for member in members:
        logits = member(x)
        check_labels(y, logits.shape[-1])
        losses.append(cross_entropy(logits, y))
        (gradient,) = torch.autograd.grad(losses[-1].sum(), x, create_graph=True)
        gradients.append(gradient.flatten(1))
    return torch.stack(losses), torch.stack(gradients)


def cosines(gradients: Tensor) -> Tensor:
    """The cosine of each pair of members: [M, B, D] -> [M (M - 1) / 2, B]."""
    # By the largest entry first: the squares of a confident network's gradients underflow.
    tall = gradients.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo().tiny)
    directions = nn.functional.normalize(gradients / tall, dim=-1)
    a, b = torch.triu_indices(len(gradients), len(gradients), offset=1)
    return (directions[a] * directions[b]).sum(-1)


class JointTraining(RobustModule):
    """Train M members with one optimizer and a loss that knows them all.

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        members: M, at least 2.
        probs: M sampling probabilities of the defense, which training does not look at; None means
            equal ones.
        attack: train on the adversarial images it makes of the ensemble; None trains on the images.
        checkpoints: weights that members start from, one path or null per member.
        optimizer: parameters of all members -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.

    Raises:
        ValueError: numbers that do not fit together.
    """

    defense: Ensemble

    def __init__(
        self,
        net: Callable[[], nn.Module],
        members: int = 3,
        probs: list[float] | None = None,
        attack: Attack | None = None,
        checkpoints: list[str | None] | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if members < 2:
            raise ValueError(f"members must be at least 2 to be trained jointly, got {members}")
        self.defense = Ensemble(new_members(net, members, checkpoints), probs)
        self.attack = attack

    @property
    def members(self) -> list[nn.Module]:
        """The M networks."""
        return self.defense.classifiers

    def attacked(self, x: Tensor, y: Tensor) -> Tensor:
        """The images to train on: adversarial ones of the ensemble, or as they are."""
        return x if self.attack is None else self.attack(self.defense, x, y, self.noise)

    def member_losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The members' cross-entropies: [M, B, K], [B] -> [M, B]."""
        check_labels(y, logits.shape[-1])
        return cross_entropy(logits, y)
