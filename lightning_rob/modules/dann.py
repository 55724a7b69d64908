"""Training of the network of the transductive defense DANN as an ordinary run."""

from collections.abc import Callable
from typing import Any, final

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_rob.defenses import Single
from lightning_rob.defenses.dann import check_parts, domain_adversarial_loss, reversal_weight
from lightning_rob.modules.base import RobustModule


@final
class DANN(RobustModule):
    """Train features that separate the classes but not the domains (Ganin et al. 2016).

    `lightning_rob.defenses.DANN` does this for each test batch. Here it is one run, under any
    strategy and evaluated every epoch, on the data of `SourceTargetData`. The result is a plain
    network.

    Args:
        net: builds the network, [B, C, H, W] -> [B, K] with `features`, `classify` and `domain`,
            such as `DANNNet`.
        scale: final weight of the reversed gradient, which grows from 0 over the steps of the run;
            Chen et al. (2022) use 0.1 for MNIST and 1 for CIFAR-10.
        **options: arguments of `RobustModule`.
    """

    defense: Single

    def __init__(self, net: Callable[[], nn.Module], scale: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        if scale < 0:
            raise ValueError(f"scale must not be negative, got {scale}")
        self.defense = Single(net())
        check_parts(self.defense.net)
        self.scale = scale
        self.target = torch.zeros(0)

    def check_trainer(self, trainer: Trainer) -> None:
        # `reversal_weight` needs the progress. `estimated_stepping_batches` is not asked yet: it
        # makes loaders, before the counters of a resumed run are restored.
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise MisconfigurationException(
                "DANN needs to know the length of the run: set trainer.max_epochs or max_steps"
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not (isinstance(batch, dict) and {"source", "target"} <= set(batch)):
            raise MisconfigurationException(
                "DANN needs unlabelled images beside the labelled ones: "
                "use the data module SourceTargetData"
            )
        target = batch["target"]
        self.target = target if isinstance(target, Tensor) else self.unpack(target)[0]
        return super().training_step(batch["source"], batch_idx)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return domain_adversarial_loss(self.defense.net, x, y, self.target, self.reversal_weight())

    def reversal_weight(self) -> float:
        """Return alpha of this step, from the trainer's counters alone: a resumed run continues."""
        progress = self.trainer.global_step / self.trainer.estimated_stepping_batches
        return reversal_weight(progress, self.scale)
