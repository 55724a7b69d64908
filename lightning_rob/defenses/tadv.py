"""TADV: adversarial retraining from fresh private randomness."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.defenses.transductive import (
    Losses,
    Retraining,
    SourceData,
    progress_bar,
    shuffled,
)
from lightning_rob.objectives import check_labels, cross_entropy
from lightning_rob.randomness import Generator

# to a Tensor; jsonargparse takes Tensor to mean a factory
TrainingAttack = Callable[[Defense, Tensor, Tensor, Generator], Any]


class TADV(Retraining):
    """A network adversarially trained anew for each test batch (Chen et al. 2022).

    An attacker cannot know its weights beforehand: all of them are drawn from the defender's
    private randomness. As in the authors' code it ignores the test batch.

    Args:
        net: [B, C, H, W] -> [B, K] logits, the static model, and the architecture to be trained.
        attack: makes the adversarial images, (defense, x, y, generator) -> x_adv: on MNIST PGD of
            40 steps of 0.01 within linf 0.3 that keeps the best iterate. The authors start half of
            the attacks from the image and half from a Gaussian direction; PGD starts uniformly.
        fraction: fraction of each batch that is attacked, its last images; also their weight.
        **options: arguments of `Retraining`; the paper has 100 epochs for MNIST, by Adam of rate
            1e-3, and 110 for CIFAR-10.

    Raises:
        TypeError: when adapting, a network whose weights cannot be drawn anew.
    """

    def __init__(
        self,
        net: nn.Module,
        source: SourceData | None = None,
        attack: TrainingAttack | None = None,
        fraction: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(net, source, **options)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        self.attack = attack
        self.fraction = fraction

    def losses(self, net: nn.Module, x: Tensor, generator: torch.Generator) -> Losses:
        if self.attack is None:
            raise ValueError(
                "TADV trains on adversarial images: give it an attack, such as "
                "attack=PGD(Threat('linf', 0.3), steps=40, step_size=0.01, keep_best=True)"
            )
        for _ in progress_bar(range(self.epochs), "Retraining"):
            order = shuffled(len(self.source), self.batch_size, generator)
            for step, index in enumerate(order, start=1):
                images, labels = self.source.gather(index, self.augment)
                batch = images.to(x), labels.to(x.device)
                loss = half_adversarial(Single(net), *batch, self.attack, self.fraction, generator)
                yield loss, step == len(order)


def half_adversarial(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    attack: TrainingAttack,
    fraction: float = 0.5,
    generator: Generator = None,
) -> Tensor:
    """Compute (1 - fraction) * CE of the first images + fraction * CE of the others, attacked."""
    # Half of an odd number is rounded up for the attack.
    clean = math.ceil((1 - fraction) * len(x) - 0.5)
    x_adv = attack(defense, x[clean:], y[clean:], generator)
    # One forward, as released: both parts share the statistics of BatchNorm.
    logits = defense.logits(torch.cat([x[:clean], x_adv]))[0]
    check_labels(y, logits.shape[-1])
    losses = cross_entropy(logits, y)
    parts = ((1 - fraction, losses[:clean]), (fraction, losses[clean:]))
    return torch.stack([share * part.mean() for share, part in parts if len(part)]).sum()
