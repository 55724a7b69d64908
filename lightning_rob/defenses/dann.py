"""DANN: a network whose features do not separate the test images from the training images."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.defenses.network import in_type_of
from lightning_rob.defenses.transductive import (
    Losses,
    Retraining,
    Source,
    SourceData,
    progress_bar,
    shuffled,
)
from lightning_rob.nets.dann import reversed_gradient
from lightning_rob.objectives import classification_loss


def check_parts(net: nn.Module) -> None:
    """Raise TypeError for a network without the parts that DANN trains."""
    parts = ("features", "classify", "domain")
    if missing := [name for name in parts if not callable(getattr(net, name, None))]:
        raise TypeError(
            f"DANN needs a network with {', '.join(parts)}, such as DANNNet: "
            f"{type(net).__name__} has no {', '.join(missing)}"
        )


def reversal_weight(progress: float, scale: float) -> float:
    """Compute alpha, which grows from 0 to the scale (Ganin et al. 2016, eq. 14)."""
    return scale * (2 / (1 + math.exp(-10 * progress)) - 1)


def domain_adversarial_loss(
    net: nn.Module, x: Tensor, y: Tensor, target: Tensor, weight: float
) -> Tensor:
    """Compute the cross-entropy of the source's classes plus that of both domains."""
    parts: Any = net

    def domain_loss(features: Tensor, domain: int) -> Tensor:
        labels = torch.full((len(features),), domain, device=features.device)
        return classification_loss(parts.domain(reversed_gradient(features, weight)), labels)

    # One after the other, so that BatchNorm sees each domain by itself.
    features = parts.features(in_type_of(net, x))
    loss = classification_loss(parts.classify(features), y) + domain_loss(features, 0)
    return loss + domain_loss(parts.features(in_type_of(net, target)), 1)


class DANN(Retraining):
    """Domain-adversarial training against the test batch (Ganin et al. 2016; Chen et al. 2022).

    `adapt` trains a new network on labelled source images and the unlabelled test images, so that
    its features separate the classes, but not the two sets. An epoch has as many steps as the
    smaller set has batches; of the larger set each epoch sees other images. `net`, the static
    model, is usually the same network trained on the source alone.

    Args:
        net: [B, C, H, W] -> [B, K] with `features`, `classify` and `domain`, such as `DANNNet`.
        scale: of the reversed gradient, see `reversal_weight`.
        **options: arguments of `Retraining`. The authors train 100 epochs by Adam at 0.001 on
            batches of 128, for CIFAR-10 of 64 by SGD at 0.1 with Nesterov's momentum and weight
            decay 0.0001, a tenth of it from epochs 50, 75 and 90.
    """

    def __init__(
        self, net: nn.Module, source: SourceData | None = None, scale: float = 0.1, **options: Any
    ) -> None:
        check_parts(net)
        super().__init__(net, source, **options)
        if scale < 0:
            raise ValueError(f"scale must not be negative, got {scale}")
        self.scale = scale

    def losses(self, net: nn.Module, x: Tensor, generator: torch.Generator) -> Losses:
        # The labels of the test images are never read.
        target = Source((x, x.new_full((len(x),), -1, dtype=torch.long)))
        for epoch in progress_bar(range(self.epochs), "DANN"):
            source_batches = shuffled(len(self.source), self.batch_size, generator)
            target_batches = shuffled(len(x), self.batch_size, generator)
            steps = min(len(source_batches), len(target_batches))
            pairs = zip(source_batches, target_batches, strict=False)
            for step, (rows, target_rows) in enumerate(pairs):
                images, labels = self.source.gather(rows, self.augment)
                unlabelled, _ = target.gather(target_rows, self.augment)
                weight = reversal_weight((epoch + step / steps) / self.epochs, self.scale)
                labelled = images.to(x), labels.to(x.device)
                loss = domain_adversarial_loss(net, *labelled, unlabelled, weight)
                yield loss, step == steps - 1
