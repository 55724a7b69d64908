"""DVERGE training: members do not share their vulnerabilities."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.attacks import PGD, attacking
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.modules.joint import JointTraining
from lightning_rob.objectives import classification_loss
from lightning_rob.randomness import Generator, generator_of
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Length, Threat, pixels

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.ELU, nn.GELU, nn.SiLU)


def feature_layers(net: nn.Module) -> list[str]:
    """Return the names of all activations, and "" for the network, with its logits as features."""
    names = [name for name, part in net.named_modules() if isinstance(part, ACTIVATIONS)]
    return [*names, ""]


def features(net: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return the output of a layer, or the input of an activation, as in the paper: [B, D].

    `layer` is the name of a module that the network calls; "" is the network itself.
    """
    if not layer:
        return network_logits(net, x)
    recorded: list[Tensor] = []
    part = net.get_submodule(layer)
    if isinstance(part, ACTIVATIONS):  # cloned, because an activation may work in place
        hook = part.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0].clone()))
    else:
        hook = part.register_forward_hook(lambda _, inputs, output: recorded.append(output))
    with hook:
        network_logits(net, x)
    return recorded[-1].flatten(1)


class _Features(Defense):
    """Defense whose "logits" are a layer's features minus target features, for PGD to shorten."""

    def __init__(self, net: nn.Module, layer: str, target: Tensor) -> None:
        super().__init__(torch.ones(1), mean_probs)
        self.net, self.layer, self.target = net, layer, PerImageValues(target)

    @property
    def foldable_networks(self) -> list[nn.Module]:
        # A folded BatchNorm moves into the convolution, whose own output it changes.
        unchanged = not self.layer or isinstance(self.net.get_submodule(self.layer), ACTIVATIONS)
        return [self.net] if unchanged else []

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        target: Tensor = self.target()
        return (features(self.net, self.layer, x) - target).unsqueeze(0)


def distil(
    net: nn.Module,
    layer: str,
    source: Tensor,
    target: Tensor,
    eps: float = 0.07,
    steps: int = 10,
    step_size: float = 0.007,
) -> Tensor:
    """Perturb source images until a layer's features are near the target's (DVERGE, eq. 1).

    Minimises ||f(z) - f(target)||_2^2 over z with ||z - source||_inf <= eps, by PGD in eval mode
    that starts from the source, without the momentum of the authors' code. Images and z are
    [B, C, H, W]; `eps` and `step_size` are in pixel units; for `layer` see `features`.
    """
    near = _Features(net, layer, target)
    # As in the search, a convolution whose own output counts is not folded.
    with attacking(near) as copied, torch.no_grad():
        near = _Features(net, layer, features(copied.net, layer, target).float())
    threat = Threat("linf", eps)
    search = PGD(
        threat,
        steps,
        step_size,
        objective=lambda logits, *_: -logits[0].square().sum(-1),
        random_start=False,
    )
    # PGD asks for labels; the objective looks at features alone.
    unused_labels = torch.zeros(len(source), dtype=torch.int64, device=source.device)
    return search(near, source, unused_labels)


class DVERGE(JointTraining):
    """Diversify the members' vulnerabilities (Yang et al. 2020, Algorithm 1).

    Each member learns to classify images distilled from every other member. They contain the other
    member's non-robust features of another image of the batch, at a layer that is drawn once an
    epoch.

    The authors step M optimizers in turn. One optimizer does the same if it updates each weight
    separately (SGD, Adam; no clipping of the total norm).

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        eps: radius of distillation in pixel units, images span [0, 1].
        steps: number of steps of distillation.
        step_size: length of a step of distillation, in pixel units.
        layers: names of the modules to distil from, see `features`; None takes `feature_layers`.
        warmup_epochs: number of first epochs with plain cross-entropy, because the paper starts
            from trained members; then optimizer and schedule restart. Use 0 with checkpoints.
        **options: arguments of `JointTraining`; the `attack` is on each member alone, which is also
            trained on these images (DVERGE with adversarial training).
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        eps: Length = 0.07,
        steps: int = 10,
        step_size: Length = 0.007,
        layers: list[str] | None = None,
        warmup_epochs: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        known = dict(self.members[0].named_modules())
        self.layers = feature_layers(self.members[0]) if layers is None else list(layers)
        unknown = [name for name in self.layers if name not in known]
        if unknown or not self.layers:
            raise ValueError(f"layers must be of {list(known)}, got {unknown or self.layers}")
        self.eps, self.steps, self.step_size = pixels(eps), steps, pixels(step_size)
        self.warmup_epochs = warmup_epochs

    def on_train_epoch_start(self) -> None:
        if 0 < self.warmup_epochs == self.current_epoch:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def epochs_of_optimizer(self) -> float:
        after = (self.trainer.max_epochs or -1) - self.warmup_epochs
        return max(self.warmup_epochs, after) if after > 0 else math.inf

    def layer(self) -> str:
        """Return the layer of the current epoch, drawn from the seed."""
        generator = generator_of(self.seed, self.current_epoch)
        return self.layers[int(torch.randint(len(self.layers), (), generator=generator))]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.current_epoch < self.warmup_epochs:
            losses = [classification_loss(network_logits(net, x), y) for net in self.members]
            return torch.stack(losses).sum()
        target, layer = x[torch.randperm(len(x), device=x.device)], self.layer()
        # Constants, made before any step: each member has a gradient from its own terms alone.
        distilled = [
            distil(member, layer, x, target, self.eps, self.steps, self.step_size)
            for member in self.members
        ]
        losses = [
            classification_loss(network_logits(member, z), y)
            for i, member in enumerate(self.members)
            for j, z in enumerate(distilled)
            if i != j
        ]
        diversity = torch.stack(losses).sum()
        if self.attack is None:
            return diversity
        losses = []
        for member in self.members:
            x_adv = self.attack(Single(member).to(x.device), x, y, self.noise)
            losses.append(classification_loss(network_logits(member, x_adv), y))
        return diversity + torch.stack(losses).sum()
