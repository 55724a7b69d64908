"""Base class of all training methods."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from lightning_rob.attacks import Attack
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.groups import Batch, unpacked
from lightning_rob.metrics import RobustAccuracy
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Streams, derive_seed, generator_of, global_seed
from lightning_rob.threat import Threat

ENOUGH = 1.1  # of the batches that OneCycleLR needs; after more its rate is far from the last one
LARGEST_BATCH = MOST_PROCESSES = 2**20  # for numbers of images that have no index


def trained_threats(module: Any) -> list[Threat]:
    """Return the threats of a module's training; none if it is not trained against attacks."""
    attack = getattr(module, "attack", None)
    attacks = attack if isinstance(attack, tuple) else (attack,)
    threats = [one.threat for one in attacks if isinstance(one, Attack)]
    own = getattr(module, "threat", None)
    return threats or ([own] if isinstance(own, Threat) else [])


class RobustModule(LightningModule, ABC):
    """Train `defense` by the loss that a subclass defines.

    A batch is images [B, C, H, W] in [0, 1], labels [B] and, if the loader has them, image indices
    [B]; `unpack` is for batches of another form. The randomness of a step is derived from seed,
    epoch, batch and image, so that neither a resumed run nor a callback changes it. In batches
    without indices it is derived from the place of an image: its process, batch and position.

    Args:
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule, stepped once an epoch, `OneCycleLR` and `CyclicLR` once
            a batch, `lightning.pytorch.cli.ReduceLROnPlateau` by the value that it monitors; None
            keeps the learning rate.
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
        self.seed = global_seed()
        self.noise: Streams | None = None
        self._predicted = 0  # images that this process has predicted

    @property
    def method(self) -> str:
        """The training as tables and model cards call it."""
        return type(self).__name__

    @abstractmethod
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the training loss of a batch: [B, C, H, W], [B] -> scalar."""

    def unpack(self, batch: Any) -> Any:
        """Return (images, labels) or (images, labels, indices); override it for other batches."""
        return batch

    def indexed(self, batch: Any, batch_idx: int) -> Batch:
        """Return images, labels and indices; where there are none, numbers of process and place."""
        x, y, index = unpacked(self.unpack(batch))
        if index is None:
            place = (batch_idx * MOST_PROCESSES + self.global_rank) * LARGEST_BATCH
            index = place + torch.arange(len(x), device=x.device)
        return x, y, index

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise MisconfigurationException if an option of the trainer does not fit this module."""

    def check_fit(self, trainer: Trainer) -> None:
        """Raise MisconfigurationException where a fit by this trainer would lose weights."""
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        if self.keeps_best and any(isinstance(one, WeightAveraging) for one in callbacks):
            raise MisconfigurationException(
                f"{type(self).__name__} keeps the best epoch of each member, and WeightAveraging "
                "would save the last average of all: leave it out"
            )
        self.check_trainer(trainer)

    def on_fit_start(self) -> None:
        self.check_fit(self.trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.train_on(self.indexed(batch, batch_idx), batch_idx)

    def train_on(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute and log the loss of images [B, C, H, W], labels [B] and indices [B]."""
        x, y, index = batch
        if batch_idx == 0:
            for threat in trained_threats(self):
                threat.check_size("training", x[0].numel())
        # Dropout draws from the global stream: it must not depend on what ran between two steps.
        torch.manual_seed(derive_seed(self.seed, self.current_epoch, batch_idx, self.global_rank))
        self.noise = Streams.from_index(index, self.seed, self.current_epoch)
        loss = self.loss(x, y)
        # The mean of all processes, for a schedule may follow it.
        self.log(
            "train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x)
        )
        return loss

    def on_validation_epoch_start(self) -> None:
        # Each rank has BatchNorm statistics of its own; checkpoints hold those of rank 0.
        for buffer in self.buffers() if self.trainer.world_size > 1 else ():
            torch.distributed.broadcast(buffer, 0)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._score("val", self.val_accuracy, self.indexed(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._score("test", self.test_accuracy, self.indexed(batch, batch_idx))

    def on_predict_start(self) -> None:
        self._predicted = 0
        give_source(self.defense, lambda: labelled_images(self.trainer))

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return image indices [B] and the probability of each prediction [B, K]."""
        x, _, index = unpacked(self.unpack(batch))
        if index is None:  # counted: Lightning deals images to the processes in turn
            counted = torch.arange(self._predicted, self._predicted + len(x), device=x.device)
            index = counted * self.trainer.world_size + self.global_rank
        self._predicted += len(x)
        # A stream of the whole batch, from which an adapting defense learns as a whole.
        adapted = self.defense.adapt(x, generator_of(self.seed, *index.tolist())).eval()
        return index, adapted(x, Streams.from_index(index, self.seed))

    def _score(self, stage: str, accuracy: RobustAccuracy, batch: Batch) -> None:
        x, y, index = batch
        predictions = self.defense(x, Streams.from_index(index, self.seed))
        check_labels(y, predictions.shape[-1])
        accuracy.update(predictions, y)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(x))

    @property
    def keeps_best(self) -> bool:
        """Whether the training ends with the weights of earlier epochs."""
        return False

    @property
    def complete(self) -> bool:
        """Whether all members have been trained; voting rules are compared from then on."""
        return True

    def on_robust_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Receive the values that a robust evaluation has just logged, by name."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **options: Any) -> Self:
        """Build the module from the arguments given, with the weights of a checkpoint."""
        try:
            module: Self = super().load_from_checkpoint(checkpoint_path, *args, **options)
        except TypeError as error:
            raise TypeError(
                f"{cls.__name__}.load_from_checkpoint needs the arguments of the class ({error}); "
                f"lightning_rob.load_module({str(checkpoint_path)!r}) takes them from the recipe "
                "that lightning-rob fit saves in a checkpoint"
            ) from error
        return module

    def saved_state(self, checkpoint: Mapping[str, Any], name: str) -> Any:
        """Return the entry that `on_save_checkpoint` added, unless another kind of module did."""
        if name not in checkpoint:
            kind = type(self).__name__
            raise ValueError(f"the checkpoint is not one of {kind}: it has no {name!r}")
        return checkpoint[name]

    def trainable_network(self) -> nn.Module:
        """Return the part whose weights the optimizer updates."""
        return self.defense

    def epochs_of_optimizer(self) -> float:
        """Return the most epochs of one optimizer; infinite, unless a run builds several."""
        return math.inf

    def _check_length(self, steps: int) -> None:
        trainer = self.trainer
        needed = trainer.estimated_stepping_batches  # from here on the batches are counted
        epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        needed = min(needed, epoch * self.epochs_of_optimizer())
        advice = f"training by one optimizer takes {needed:.0f}: give it total_steps={needed:.0f}"
        if needed > steps:  # torch says so only after the last step, hours later
            raise MisconfigurationException(f"OneCycleLR ends after {steps} batches, {advice}")
        if steps > ENOUGH * needed and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(f"OneCycleLR is cut off before its {steps} batches: {advice}")

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.trainable_network().parameters())
        schedule = self.lr_scheduler and self.lr_scheduler(optimizer)
        if not schedule:
            return {"optimizer": optimizer}
        config: dict[str, Any] = {"scheduler": schedule}
        if isinstance(schedule, OneCycleLR | CyclicLR):
            config["interval"] = "step"
        if isinstance(schedule, OneCycleLR):
            self._check_length(schedule.total_steps)
        if isinstance(schedule, ReduceLROnPlateau):
            config["monitor"] = monitor = getattr(schedule, "monitor", None)
            if monitor is None:
                raise MisconfigurationException(
                    "ReduceLROnPlateau needs the name of a logged value: use "
                    "lightning.pytorch.cli.ReduceLROnPlateau, with monitor=val/robust/worst and "
                    "mode=max"
                )
            if monitor.startswith("val/robust/"):
                # Between two evaluations the schedule would count the old value again.
                callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]
                measuring = [c for c in callbacks if hasattr(c, "measures")]
                name = monitor.removeprefix("val/robust/")
                measuring = [c for c in measuring if c.measures(name)] or measuring
                every = [one.every_n_epochs for one in measuring]
                config["frequency"] = math.lcm(self.trainer.check_val_every_n_epoch or 1, *every)
        return {"optimizer": optimizer, "lr_scheduler": config}
