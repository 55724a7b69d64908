"""DVERGE: members that are not fooled by each other's weaknesses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD, Attack, attacking
from lightning_rob.defenses import Defense, Single
from lightning_rob.modules.joint import JointTraining
from lightning_rob.objectives import Objective, classification_loss
from lightning_rob.randomness import Generator, derive_seed
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat, pixels

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.GELU, nn.SiLU)


def feature_layers(net: nn.Module) -> list[str]:
    """The names of all activations, and "" for the whole network, whose features are its logits."""
    found = [name for name, part in net.named_modules() if isinstance(part, ACTIVATIONS)]
    return [*found, ""]


def features(net: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What a layer puts out, or what an activation takes in, as the paper has it.

    Args:
        net: the network.
        layer: name of one of its modules; "" is the network itself.
        x: [B, C, H, W] images.

    Returns:
        [B, D].

    Raises:
        ValueError: the module takes no part.
    """
    found: list[Tensor] = []
    part = net.get_submodule(layer)
    if isinstance(part, ACTIVATIONS):  # a copy, because some work in place
        hook = part.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].clone()))
    else:
        hook = part.register_forward_hook(lambda _, inputs, output: found.append(output))
    try:
        net(x)
    finally:
        hook.remove()
    if not found:
        raise ValueError(f"layer {layer!r} takes no part in {type(net).__name__}'s answer")
    return found[-1].flatten(1)


class _Features(Defense):
    """A network as PGD sees it here: its "logits" are a layer's features."""

    def __init__(self, net: nn.Module, layer: str) -> None:
        super().__init__(torch.ones(1), mean_probs)
        self.net, self.layer = net, layer

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """The network, where folding BatchNorm into the layer before leaves the features alone."""
        whole = not self.layer or isinstance(self.net.get_submodule(self.layer), ACTIVATIONS)
        return [self.net] if whole else []

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return features(self.net, self.layer, x).unsqueeze(0)


def _closeness_to(target: Tensor) -> Objective:
    def objective(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        return -(logits[0] - target).square().sum(-1)

    return objective


def distil(
    net: nn.Module,
    layer: str,
    source: Tensor,
    target: Tensor,
    eps: float = 0.07,
    steps: int = 10,
    step_size: float = 0.007,
) -> Tensor:
    """Images that look like the source and that a layer takes for the target (DVERGE, eq. 1).

    argmin over z of ||f(z) - f(target)||_2^2 with ||z - source||_inf <= eps, by PGD in eval mode
    from the source, without the momentum of the authors' code.

    Args:
        net: [B, C, H, W] -> [B, K].
        layer: see `features`.
        source: [B, C, H, W] images.
        target: [B, C, H, W] images.
        eps: radius in pixel units, images span [0, 1].
        steps: number of steps.
        step_size: length of a step in pixel units.

    Returns:
        [B, C, H, W].
    """
    with attacking(_Features(net, layer)), torch.no_grad():
        wanted = features(net, layer, target).float()
    search = PGD(
        Threat("linf", eps), steps, step_size, objective=_closeness_to(wanted), random_start=False
    )
    labels = torch.zeros(len(source), dtype=torch.int64, device=source.device)  # nobody reads them
    return search(_Features(net, layer), source, labels)


class DVERGE(JointTraining):
    """Diversified vulnerabilities (Yang et al. 2020, Algorithm 1).

    Each member learns to classify rightly the images distilled from every other member, which hold
    that one's non-robust features of another image of the batch, at one layer drawn for the epoch.
    The authors step M optimizers in turn. As the distilled images are constants made before any
    step, a member's weights get their gradient from its own terms of the sum alone: one optimizer
    does the same if it treats each weight by itself (SGD, Adam; no clipping of a common norm).

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        eps: radius of distillation in pixel units, images span [0, 1].
        steps: of distillation.
        step_size: of distillation, in pixel units.
        layers: names of the modules to distil from, see `features`; None takes `feature_layers`.
        warmup_epochs: first train by cross-entropy for so many epochs, as the paper starts from
            trained members; then optimizer and schedule begin anew. 0 where there are checkpoints.
        diversity_weight: weight of the distilled images beside the adversarial ones, if any.
        **options: those of `JointTraining`; the `attack` is on each member alone, which is trained
            on these images also (DVERGE with adversarial training).

    Raises:
        ValueError: a layer that the network does not have.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        eps: float = 0.07,
        steps: int = 10,
        step_size: float = 0.007,
        layers: list[str] | None = None,
        warmup_epochs: int = 0,
        diversity_weight: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        known = dict(self.members[0].named_modules())
        self.layers = feature_layers(self.members[0]) if layers is None else list(layers)
        strange = [name for name in self.layers if name not in known]
        if strange or not self.layers:
            raise ValueError(f"layers must be of {list(known)}, got {strange or self.layers}")
        self.eps, self.steps, self.step_size = pixels(eps), steps, pixels(step_size)
        self.warmup_epochs = warmup_epochs
        self.diversity_weight = diversity_weight

    def on_train_epoch_start(self) -> None:
        """Begin with a new optimizer when the members are warm."""
        if 0 < self.warmup_epochs == self.current_epoch:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def layer(self) -> str:
        """The layer of this epoch."""
        chance = torch.Generator().manual_seed(derive_seed(self.seed, self.current_epoch))
        return self.layers[int(torch.randint(len(self.layers), (), generator=chance))]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Sum of the members' cross-entropies, each on images distilled from all the others."""
        if self.current_epoch < self.warmup_epochs:
            return torch.stack([classification_loss(member(x), y) for member in self.members]).sum()
        target, layer = x[torch.randperm(len(x), device=x.device)], self.layer()
        distilled = [
            distil(member, layer, x, target, self.eps, self.steps, self.step_size)
            for member in self.members
        ]
        total = self.diversity_weight * self._diversity(distilled, y)
        return total if self.attack is None else total + self._adversarial(self.attack, x, y)

    def _diversity(self, distilled: list[Tensor], y: Tensor) -> Tensor:
        losses = [
            classification_loss(member(z), y)
            for i, member in enumerate(self.members)
            for j, z in enumerate(distilled)
            if i != j
        ]
        return torch.stack(losses).sum()

    def _adversarial(self, attack: Attack, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for member in self.members:
            x_adv = attack(Single(member).to(x.device), x, y, self.noise)
            losses.append(classification_loss(member(x_adv), y))
        return torch.stack(losses).sum()
