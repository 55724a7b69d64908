"""What every training method shares."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.learning import give_source
from lightning_rob.metrics import RobustAccuracy
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Streams, derive_seed

Batch = tuple[Tensor, Tensor, Tensor]


class RobustModule(LightningModule, ABC):
    """Trains `defense`; subclasses say what the loss is.

    A batch is images [B, C, H, W] in [0, 1], labels [B] and image indices [B]. All chance in a step
    follows from seed, epoch, batch and image: neither resumption nor a callback can change it.

    Args:
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule, stepped once an epoch; None keeps the rate.
    """

    defense: Defense

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.val_accuracy, self.test_accuracy = RobustAccuracy(), RobustAccuracy()
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.noise: Streams | None = None

    @abstractmethod
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The training loss of a batch: [B, C, H, W], [B] -> scalar."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, with this step's own randomness."""
        x, y, index = batch
        torch.manual_seed(derive_seed(self.seed, self.current_epoch, batch_idx, self.global_rank))
        self.noise = Streams.from_index(index, self.seed, self.current_epoch)
        loss = self.loss(x, y)
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Evaluate what is saved: every process takes the first one's BatchNorm statistics."""
        for buffer in self.buffers() if self.trainer.world_size > 1 else ():
            torch.distributed.broadcast(buffer, 0)

    def on_test_epoch_start(self) -> None:
        """The same before a test."""
        self.on_validation_epoch_start()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Clean accuracy, `val/acc`."""
        self._score("val", self.val_accuracy, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Clean accuracy, `test/acc`."""
        self._score("test", self.test_accuracy, batch)

    def on_predict_start(self) -> None:
        """Give transductive defenses the labelled training images."""
        give_source(self.defense, lambda: labelled_images(self.trainer))

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """The images' indices [B] and the probability of each answer [B, K], batch by batch."""
        x, _, index = batch
        private = torch.Generator().manual_seed(derive_seed(self.seed, *index.tolist()))
        final = self.defense.adapt(x, private).eval()
        return index, final(x, Streams.from_index(index, self.seed))

    def _score(self, stage: str, accuracy: RobustAccuracy, batch: Batch) -> None:
        x, y, index = batch
        answers = self.defense(x, Streams.from_index(index, self.seed))
        check_labels(y, answers.shape[-1])
        accuracy.update(answers, y)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(x))

    @property
    def complete(self) -> bool:
        """Whether all members have been trained; voting rules are compared from then on."""
        return True

    def on_robust_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Called after each robust evaluation with what it logged, never with stale values."""

    def kept_in(self, checkpoint: Mapping[str, Any], name: str) -> Any:
        """What `on_save_checkpoint` put into a checkpoint under a name.

        Raises:
            ValueError: the checkpoint is of another kind of module.
        """
        if name not in checkpoint:
            kind = type(self).__name__
            raise ValueError(f"the checkpoint is not one of {kind}: it has no {name!r}")
        return checkpoint[name]

    def trained(self) -> nn.Module:
        """The part whose weights are trained."""
        return self.defense

    def configure_optimizers(self) -> Any:
        """The optimizer of `trained()`, and its schedule by epoch."""
        optimizer = self.optimizer(self.trained().parameters())
        schedule = self.lr_scheduler and self.lr_scheduler(optimizer)
        return {"optimizer": optimizer} | ({"lr_scheduler": schedule} if schedule else {})
