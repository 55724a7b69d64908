"""Ensembles of which each member is trained on images that a transformation has changed."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rob.attacks import evaluating
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.data.image_data import ImageData, at_least
from lightning_rob.data.transformed import CHUNK, Shown
from lightning_rob.defenses.transform_ensemble import TransformEnsemble, transformed
from lightning_rob.files import atomic_save
from lightning_rob.modules.base import Batch, RobustModule
from lightning_rob.nets.contents import read_file
from lightning_rob.objectives import classification_loss, cross_entropy
from lightning_rob.randomness import Streams
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.transforms.pool import chosen


@dataclass
class Turn:
    """How the sub-model in training has done so far.

    Args:
        epochs: it has been trained for.
        loss: its lowest validation loss.
        since: epochs since then.
        weights: of then.
        over: it has stopped, and so have those of the other processes.
    """

    epochs: int = 0
    loss: float = math.inf
    since: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    over: bool = False


class TransformTraining(RobustModule):
    """Train a sub-model for each transformation, one after another (Meng et al. 2020, "Athena").

    Each is trained on images as its transformation leaves them, until the cross-entropy on the
    validation images, transformed alike, has not fallen for `patience` epochs; its best weights
    are kept. Several processes train as many sub-models at a time, each on all images. `defense` is
    the ensemble of those begun so far.

    Training images without augmentation are transformed once, the chance in a transformation being
    keyed by image; augmented ones anew in every epoch.

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per sub-model.
        transforms: names of `lightning_rob.transforms.pool`, or words for several of them, such as
            "reversible", "14r+28i" or ["clean", "flip_both"].
        epochs: at most so many for each; `trainer.max_epochs` must allow for all.
        patience: epochs without a better validation loss after which the next one's turn is.
        rule: how the sub-models' votes become an answer.
        draw_seed: of the draw where `transforms` leaves one open.
        folder: where sub-models that are through are kept, a file each; what is there already is
            not trained again.
        cache: folder for transformed images; None keeps them in memory as long as they are needed.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch, anew for each sub-model.

    Raises:
        ValueError: an unknown name, or a count below 1.
    """

    trains_apart = True

    def __init__(
        self,
        net: Callable[[], nn.Module],
        transforms: list[str] | str = "reversible",
        epochs: int = 50,
        patience: int = 3,
        rule: Rule = mean_probs,
        draw_seed: int = 0,
        folder: str | None = None,
        cache: str | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        at_least(1, epochs=epochs, patience=patience)
        self.transforms = chosen(transforms, draw_seed)
        self.names = list(self.transforms)
        self.members = nn.ModuleList(net() for _ in self.names)
        self.epochs, self.patience, self.rule = epochs, patience, rule
        self.folder, self.cache = folder, cache
        self.waiting = list(range(len(self.names)))
        self.now: list[int] = []
        self.turn = Turn()
        self.images: dict[str, Shown] = {}
        self.seen: dict[str, Tensor] = {}

    @property
    def defense(self) -> TransformEnsemble:  # type: ignore[override]
        """The sub-models that are through or in training; all where none has begun."""
        begun = [i for i in range(len(self.names)) if i not in self.waiting]
        begun = begun or list(range(len(self.names)))
        transforms = {self.names[i]: self.transforms[self.names[i]] for i in begun}
        ensemble = TransformEnsemble([self.members[i] for i in begun], transforms, self.rule)
        return ensemble.to(self.device)

    @property
    def mine(self) -> int:
        """The sub-model that this process trains; where processes are too many, that of another."""
        return self.now[min(self.global_rank, len(self.now) - 1)] if self.now else -1

    def trained(self) -> nn.Module:
        """The sub-model that this process trains."""
        return self.members[self.mine]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy on images that are transformed already."""
        return classification_loss(self.trained()(x), y)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss on the images as the sub-model sees them."""
        x, y, index = batch
        if "train" in self.images:
            x = self._seen("train")[self.images["train"].rows(index)].to(x.device)
        else:
            name, noise = (
                self.names[self.mine],
                Streams.from_index(index, self.seed, self.current_epoch),
            )
            x = transformed(self.transforms[name], name, x, noise)
        return super().training_step((x, y, index), batch_idx)

    def setup(self, stage: str) -> None:
        """Bring the images into memory, and take over the sub-models that are there."""
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, ImageData) or not len(data.parts["val"]):
            raise MisconfigurationException(
                "TransformTraining needs validation images for early stopping, and one of the data "
                "modules of lightning_rob.data: set data.val_size to 1 or more"
            )
        if not data.parts["train"].steps:
            self.images["train"] = Shown(data.parts["train"], self.cache)
        self.images["val"] = Shown(data.parts["val"], self.cache)
        there = self.trainer.strategy.broadcast(self._there())
        for member, weights in there.items():
            self.members[member].load_state_dict(weights)
        self.waiting = [i for i in range(len(self.names)) if i not in there]
        self._begin()

    def on_train_start(self) -> None:
        """Check the number of epochs, and let each process go its own way."""
        turns = 1 + -(-len(self.waiting) // self.trainer.world_size)
        needed = self.epochs * turns - self.turn.epochs if self.now else 0
        most, trial = self.trainer.max_epochs, self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if not trial and most not in (None, -1) and most < self.current_epoch + needed:
            raise MisconfigurationException(
                f"trainer.max_epochs must be at least {self.current_epoch + needed}, {self.epochs} "
                f"for each sub-model, or -1, got {most}; early stopping ends it earlier"
            )
        every = self.trainer.check_val_every_n_epoch, self.trainer.val_check_interval
        if every != (1, 1.0):
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss of every epoch: leave "
                "trainer.check_val_every_n_epoch and trainer.val_check_interval at 1"
            )
        if self.trainer.world_size > 1:
            self._go_apart()
        if not self.now or (self.turn.over and not self.waiting):
            self.trainer.should_stop = True

    def _go_apart(self) -> None:
        """Keep DDP from averaging what is of different sub-models."""
        mixing = any(isinstance(part, nn.SyncBatchNorm) for part in self.modules())
        if mixing or not isinstance(self.trainer.model, DistributedDataParallel):
            raise MisconfigurationException(
                "each process trains a sub-model of its own: use trainer.strategy=ddp, without "
                "sync_batchnorm"
            )
        self.trainer.model.require_backward_grad_sync = False
        self.trainer.model.require_forward_param_sync = False

    def on_train_epoch_start(self) -> None:
        """Go on to the next sub-models when their turn has come."""
        if self.turn.over:
            self._begin()
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_validation_epoch_start(self) -> None:
        """Let every process have all sub-models, and see how they do on validation images."""
        if self.trainer.state.fn != "fit":
            super().on_validation_epoch_start()
            return
        self._exchange()
        if not self.trainer.sanity_checking:
            self._judge()

    def on_train_epoch_end(self) -> None:
        """Before a checkpoint is written, restore the best weights of those that are through.

        Raises:
            MisconfigurationException: there was no validation.
        """
        if not self.turn.epochs:
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss: validate after every epoch, "
                "leave trainer.limit_val_batches above 0"
            )
        if not self.turn.over:
            return
        self.trained().load_state_dict(self.turn.weights)
        self._exchange()
        for member in self.now if self.trainer.is_global_zero else ():
            self._keep(member)
        if not self.waiting:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store which sub-models are in training, and their best weights."""
        checkpoint["turns"] = {
            "now": self.now,
            "waiting": self.waiting,
            "turn": asdict(self.turn),
            "processes": self.trainer.world_size,
            "transforms": [list(pair) for pair in self._described()],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` stored, before the optimizer is made.

        Of several processes only the first one's optimizer is in a checkpoint: their sub-models go
        on from their weights, but with optimizers of their own and all their epochs.
        """
        state = self.kept_in(checkpoint, "turns")
        if [tuple(pair) for pair in state["transforms"]] != self._described():
            names = ", ".join(name for name, _ in state["transforms"])
            raise ValueError(
                f"the checkpoint's sub-models are behind other transformations: {names}, not "
                f"{', '.join(self.names)}"
            )
        self.now, self.waiting = state["now"], state["waiting"]
        self.turn = Turn(**state["turn"])
        if self.trainer.state.fn != "fit":
            return
        if self.turn.over or max(state["processes"], self.trainer.world_size) > 1:
            if not self.turn.over:
                self.waiting = self.now + self.waiting
            self._begin()
            checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []

    def _begin(self) -> None:
        """The next sub-models' turn, as many as there are processes."""
        count = self.trainer.world_size
        self.now, self.waiting = self.waiting[:count], self.waiting[count:]
        self.turn = Turn()
        self.seen = {}

    def _seen(self, part: str) -> Tensor:
        """The images of a part as the sub-model of this process sees them: [N, C, H, W]."""
        if part not in self.seen:
            name, images = self.names[self.mine], self.images[part]
            bar = AttackProgress(self.trainer, f"Transforming {part} images", len(images.y))
            self.seen[part] = images.through(
                self.transforms[name], name, self.seed, lambda count: bar.advance(name, count)
            )
            bar.close()
        return self.seen[part]

    @torch.no_grad()
    def _validation_loss(self) -> float:
        net, seen, y = self.trained(), self._seen("val"), self.images["val"].y
        parts = [slice(start, start + CHUNK) for start in range(0, len(y), CHUNK)]
        with evaluating(net):
            losses = [
                cross_entropy(net(seen[part].to(self.device)), y[part].to(self.device))
                for part in parts
            ]
        return float(torch.cat(losses).double().mean())

    def _judge(self) -> None:
        """Keep the weights of the best epoch, and find out whether it was the last."""
        turn, loss = self.turn, self._validation_loss()
        stopped = turn.epochs >= self.epochs or turn.since >= self.patience
        turn.epochs += 1
        if not stopped and loss < turn.loss:
            state = self.trained().state_dict()
            turn.weights = {key: value.detach().cpu().clone() for key, value in state.items()}
            turn.loss, turn.since = loss, 0
        elif not stopped:
            turn.since += 1
        stopped = turn.epochs >= self.epochs or turn.since >= self.patience
        sick = stopped and not turn.weights
        told = torch.tensor([loss, float(stopped), float(sick)], device=self.device)
        found = torch.as_tensor(self.all_gather(told)).view(-1, 3)[: len(self.now)]
        losses, ends, failures = found.unbind(1)
        for member, value in zip(self.now, losses, strict=True):
            self.log(f"val/loss/{self.names[member]}", value, sync_dist=True)
        turn.over = bool(ends.all())
        if failures.any():
            names = [self.names[i] for i, bad in zip(self.now, failures, strict=True) if bad]
            raise ValueError(f"the validation loss is no number: {', '.join(names)}")

    def _exchange(self) -> None:
        """Every process takes each sub-model in training from the process that trains it."""
        for owner, member in enumerate(self.now if self.trainer.world_size > 1 else ()):
            for tensor in self.members[member].state_dict().values():
                torch.distributed.broadcast(tensor, owner)

    def _described(self) -> list[tuple[str, str]]:
        """The sub-models' transformations, in order."""
        return [(name, repr(transform)) for name, transform in self.transforms.items()]

    def _about(self, member: int) -> dict[str, Any]:
        """What a kept sub-model must have been trained on, and how, to be taken over."""
        train, trainer = self.trainer.datamodule.parts["train"], self.trainer  # type: ignore[attr-defined]
        digests = [images.digest for images in self.images.values()]
        return {
            "transform": repr(self.transforms[self.names[member]]),
            "net": repr(self.members[member]),
            "images": [len(train), len(train.steps), *digests],
            "training": [self.seed, self.epochs, self.patience, str(trainer.limit_train_batches)],
        }

    def _keep(self, member: int) -> None:
        if self.folder is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            weights = {k: v.cpu() for k, v in self.members[member].state_dict().items()}
            content = {"state_dict": weights, "about": self._about(member)}
            atomic_save(content, Path(self.folder) / f"{self.names[member]}.pt")

    def _there(self) -> dict[int, dict[str, Tensor]]:
        """The weights of the sub-models in the folder; asked of the first process only."""
        if self.folder is None or not self.trainer.is_global_zero:
            return {}
        paths = {i: Path(self.folder) / f"{name}.pt" for i, name in enumerate(self.names)}
        return {i: self._weights(i, path) for i, path in paths.items() if path.exists()}

    def _weights(self, member: int, path: Path) -> dict[str, Tensor]:
        kept, wanted = read_file(path), self._about(member)
        if differ := [key for key, value in wanted.items() if kept["about"].get(key) != value]:
            raise ValueError(
                f"{path} was trained otherwise ({', '.join(differ)}): name another model.folder, "
                "or remove it"
            )
        found: dict[str, Tensor] = kept["state_dict"]
        return found
