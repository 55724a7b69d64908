"""Domain-adversarial training on labelled and on unlabelled images together."""

from collections.abc import Callable
from typing import Any, final

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.defenses import Single
from lightning_rob.defenses.dann import check_parts, domain_adversarial_loss, reversal_weight
from lightning_rob.modules.base import RobustModule


@final
class DANN(RobustModule):
    """Train features that tell the classes but not the domains (Ganin et al. 2016).

    It is what the defense of that name does for a test batch, as a run of its own: with
    `SourceTargetData` for data, under any strategy, evaluated every epoch. The result is a plain
    network.

    Args:
        net: makes the network, [B, C, H, W] -> [B, K] with `features`, `classify` and `domain`,
            such as `DANNNet`.
        scale: of the reversed gradient, whose weight grows to it over the steps of the whole run;
            Chen et al. (2022) use 0.1 for MNIST and 1 for CIFAR-10.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.

    Raises:
        TypeError: the network has no such parts.
        ValueError: a negative scale.
    """

    defense: Single

    def __init__(
        self,
        net: Callable[[], nn.Module],
        scale: float = 0.1,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if scale < 0:
            raise ValueError(f"scale must not be negative, got {scale}")
        self.defense = Single(net())
        check_parts(self.defense.net)
        self.scale = scale
        self.target = torch.zeros(0)

    def on_fit_start(self) -> None:
        """Refuse a run without an end: the weight depends on how much of it is done."""
        # Not by `estimated_stepping_batches`: it makes loaders before the counters are restored.
        if self.trainer.max_epochs == -1 and self.trainer.max_steps == -1:
            raise MisconfigurationException(
                "DANN needs to know the length of the run: set trainer.max_epochs or max_steps"
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss on the batch's source and target images."""
        if not (isinstance(batch, dict) and {"source", "target"} <= set(batch)):
            raise MisconfigurationException(
                "DANN needs unlabelled images beside the labelled ones: "
                "use the data module SourceTargetData"
            )
        self.target = batch["target"][0]
        return super().training_step(batch["source"], batch_idx)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of the classes and of the domains."""
        return domain_adversarial_loss(self.defense.net, x, y, self.target, self.reversal_weight())

    def reversal_weight(self) -> float:
        """Alpha at this step; by the trainer's counters alone, so that a resumed run goes on."""
        progress = self.trainer.global_step / self.trainer.estimated_stepping_batches
        return reversal_weight(progress, self.scale)
