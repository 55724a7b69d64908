"""Training of transformation ensembles: each member sees images changed by its transformation."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rob.attacks import evaluating
from lightning_rob.data.base import ImageData, IndexedSubset, Sample
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.transform_ensemble import TransformEnsemble, transformed
from lightning_rob.evaluation.groups import unpacked
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets.weights import read_file
from lightning_rob.objectives import classification_loss, cross_entropy
from lightning_rob.randomness import Streams
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.files import atomic_save
from lightning_rob.transforms import Transform
from lightning_rob.transforms.pool import chosen

CHUNK = 256  # images at a time, so that memory stays flat


@dataclass
class TrainingState:
    """Early stopping of the sub-model that this rank trains."""

    epochs: int = 0
    best_loss: float = math.inf  # on the validation images
    epochs_since_best: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    finished: bool = False  # the sub-models of all ranks have stopped

    def update(self, loss: float, net: nn.Module) -> None:
        self.epochs += 1
        self.epochs_since_best += 1
        if loss < self.best_loss:
            state = net.state_dict()
            self.best_weights = {k: v.detach().cpu().clone() for k, v in state.items()}
            self.best_loss, self.epochs_since_best = loss, 0


class TransformedImages:
    """Images of a subset in memory, transformed on request."""

    def __init__(self, part: IndexedSubset | Sequence[Sample]) -> None:
        rows = [part[i] for i in range(len(part))]
        self.x = torch.stack([x for x, *_ in rows])
        self.y = torch.tensor([int(y) for _, y, _ in rows])
        self.index = torch.tensor([index for *_, index in rows])
        self._positions = torch.full((int(self.index.max()) + 1,), -1)
        self._positions[self.index] = torch.arange(len(rows))

    def positions(self, index: Tensor) -> Tensor:
        """Return the positions [B] of the images with these indices [B]."""
        return self._positions[index.cpu()]

    def transformed(self, transform: Transform, name: str, seed: int) -> Tensor:
        """Return all images [N, C, H, W] transformed; the randomness is keyed by image."""
        chunks = []
        for start in range(0, len(self.x), CHUNK):
            x, index = self.x[start : start + CHUNK], self.index[start : start + CHUNK]
            with torch.no_grad():
                chunks.append(transformed(transform, name, x, Streams.from_index(index, seed)))
        return torch.cat(chunks)

    @cached_property
    def digest(self) -> str:
        """Hash of the images, their labels and indices."""
        digest = hashlib.sha256(f"{self.x.dtype} {list(self.x.shape)}".encode())
        for tensor in (self.x, self.y, self.index):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


class TransformTraining(RobustModule):
    """Train a sub-model for each transformation, one after another (Meng et al. 2020, "Athena").

    A sub-model is trained on transformed images until its cross-entropy on transformed validation
    images has not fallen for `patience` epochs; then its best weights are restored. Each rank
    trains another sub-model, on all images. `defense` is the ensemble of the sub-models whose
    training has started.

    Training images without augmentation are transformed once, by a random stream keyed by image;
    augmented images, and those of a loader that is not of this package, anew in every epoch.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per sub-model.
        transforms: names of `lightning_rob.transforms.pool`, or expressions for several of them,
            such as "reversible", "14r+28i" or ["clean", "flip_both"].
        epochs: maximum number of epochs of a sub-model; `trainer.max_epochs` must allow for all.
        patience: number of epochs without a lower validation loss after which a sub-model stops.
        rule: turns the sub-models' logits into a prediction.
        draw_seed: seed of the draw where `transforms` asks for one.
        folder: where the weights of finished sub-models are saved, a file each; sub-models that are
            there already are not trained again.
        lr_scheduler: optimizer -> schedule, stepped once an epoch and restarted for each sub-model.
    """

    trains_apart = True  # data modules give each rank all images

    def __init__(
        self,
        net: Callable[[], nn.Module],
        transforms: list[str] | str = "reversible",
        epochs: int = 50,
        patience: int = 3,
        rule: Rule = mean_probs,
        draw_seed: int = 0,
        folder: str | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        at_least(1, epochs=epochs, patience=patience)
        self.transforms = chosen(transforms, draw_seed)
        self.names = list(self.transforms)
        self.members = nn.ModuleList(net() for _ in self.names)
        self.epochs, self.patience, self.rule = epochs, patience, rule
        self.folder = folder
        self.pending = list(range(len(self.names)))
        self.current: list[int] = []  # the sub-model of each rank, in the order of ranks
        self.state = TrainingState()
        self.images: dict[str, TransformedImages] = {}
        self.transformed_images: dict[str, Tensor] = {}

    @property
    def complete(self) -> bool:
        return not self.pending

    @property
    def defense(self) -> TransformEnsemble:  # type: ignore[override]
        started = [i for i in range(len(self.names)) if i not in self.pending]
        started = started or list(range(len(self.names)))  # all before a fit
        transforms = {self.names[i]: self.transforms[self.names[i]] for i in started}
        ensemble = TransformEnsemble([self.members[i] for i in started], transforms, self.rule)
        return ensemble.to(self.device)

    @property
    def member_on_this_rank(self) -> int:
        """Return the index of the sub-model trained here; surplus ranks repeat the last one."""
        return self.current[min(self.global_rank, len(self.current) - 1)] if self.current else -1

    def trainable_network(self) -> nn.Module:
        return self.members[self.member_on_this_rank]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return classification_loss(network_logits(self.trainable_network(), x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = self.indexed(batch, batch_idx)
        if "train" in self.images:  # transformed once
            x = self._transformed("train")[self.images["train"].positions(index)].to(x.device)
        else:
            name = self.names[self.member_on_this_rank]
            noise = Streams.from_index(index, self.seed, self.current_epoch)
            x = transformed(self.transforms[name], name, x, noise)
        return self.train_on((x, y, index), batch_idx)

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ImageData):
            if not len(data.parts["val"]):
                raise MisconfigurationException(
                    "TransformTraining needs validation images for early stopping: set "
                    "data.val_size to 1 or more"
                )
            if not data.parts["train"].augmentations:
                self.images["train"] = TransformedImages(data.parts["train"])
            self.images["val"] = TransformedImages(data.parts["val"])
        elif self.trainer.world_size > 1 or self.folder:
            raise MisconfigurationException(
                "TransformTraining by several processes, or with a folder, needs one of the data "
                "modules of lightning_rob.data, which know each image by its index"
            )
        # Rank 0 alone reads the folder, which others may not see.
        finished = self.trainer.strategy.broadcast(self._finished_weights())
        for member, weights in finished.items():
            self.members[member].load_state_dict(weights)
        self.pending = [i for i in range(len(self.names)) if i not in finished]
        self._start_next()

    def on_train_start(self) -> None:
        trainer: Any = self.trainer
        # Each turn trains one sub-model per rank; the current one may be partly done.
        turns = 1 + -(-len(self.pending) // trainer.world_size)
        needed = self.epochs * turns - self.state.epochs if self.current else 0
        needed, most = self.current_epoch + needed, trainer.max_epochs
        if not trainer.fast_dev_run and most not in (None, -1) and most < needed:
            raise MisconfigurationException(
                f"trainer.max_epochs must be at least {needed}, {self.epochs} for each sub-model, "
                f"or -1, got {most}; early stopping ends it earlier"
            )
        if (trainer.check_val_every_n_epoch, trainer.val_check_interval) != (1, 1.0):
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss of every epoch: leave "
                "trainer.check_val_every_n_epoch and trainer.val_check_interval at 1"
            )
        if trainer.world_size > 1:
            mixing = any(isinstance(part, nn.SyncBatchNorm) for part in self.modules())
            if mixing or not isinstance(trainer.model, DistributedDataParallel):
                raise MisconfigurationException(
                    "each process trains a sub-model of its own: use trainer.strategy=ddp, without "
                    "sync_batchnorm"
                )
            # DDP would average gradients and buffers of different sub-models.
            trainer.model.require_backward_grad_sync = False
            trainer.model.require_forward_param_sync = False
        if not self.current or (self.state.finished and not self.pending):
            trainer.should_stop = True

    def on_train_epoch_start(self) -> None:
        if self.state.finished:
            self._start_next()
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn != "fit":
            super().on_validation_epoch_start()
            return
        self._exchange()
        if self.trainer.sanity_checking:
            return
        # Keep the weights of the best epoch, and find out whether all ranks have stopped.
        loss = self._validation_loss()
        if self._has_stopped():  # and waits for other ranks: its best weights stay
            self.state.epochs += 1
        else:
            self.state.update(loss, self.trainable_network())
        stopped = self._has_stopped()
        # An error on one rank alone would leave the others waiting: all hear of it, and all raise.
        never_finite = stopped and not self.state.best_weights
        report = torch.tensor([loss, float(stopped), float(never_finite)], device=self.device)
        reports = torch.as_tensor(self.all_gather(report)).view(-1, 3)[: len(self.current)]
        losses, ends, failures = reports.unbind(1)
        for member, value in zip(self.current, losses, strict=True):
            self.log(f"val/loss/{self.names[member]}", value, sync_dist=True)
        self.state.finished = bool(ends.all())
        if failures.any():
            names = [self.names[i] for i, bad in zip(self.current, failures, strict=True) if bad]
            raise ValueError(f"the validation loss is no number: {', '.join(names)}")

    def on_train_epoch_end(self) -> None:
        if not self.state.epochs:
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss: validate after every epoch, "
                "leave trainer.limit_val_batches above 0"
            )
        if not self.state.finished:
            return
        self.trainable_network().load_state_dict(self.state.best_weights)
        self._exchange()  # before a checkpoint is written by rank 0
        trial = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.folder is not None and self.trainer.is_global_zero and not trial:
            for member in self.current:
                state = self.members[member].state_dict()
                weights = {key: value.cpu() for key, value in state.items()}
                content = {"state_dict": weights, "conditions": self._conditions(member)}
                atomic_save(content, Path(self.folder) / f"{self.names[member]}.pt")
        if not self.pending:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["transform_training"] = {
            "current": self.current,
            "pending": self.pending,
            "state": asdict(self.state),
            "processes": self.trainer.world_size,
            "transforms": [[name, repr(one)] for name, one in self.transforms.items()],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = self.saved_state(checkpoint, "transform_training")
        own = [[name, repr(one)] for name, one in self.transforms.items()]
        if [list(pair) for pair in saved["transforms"]] != own:
            names = ", ".join(name for name, _ in saved["transforms"])
            raise ValueError(
                f"the checkpoint's sub-models are behind other transformations: {names}, not "
                f"{', '.join(self.names)}"
            )
        self.current, self.pending = saved["current"], saved["pending"]
        self.state = TrainingState(**saved["state"])
        if self._trainer is None or self.trainer.state.fn != "fit":  # `lightning_rob.load` has none
            return
        # A checkpoint of several processes holds the optimizer of rank 0 only: their sub-models
        # resume from their weights, with new optimizers and all their epochs.
        if self.state.finished or max(saved["processes"], self.trainer.world_size) > 1:
            if not self.state.finished:
                self.pending = self.current + self.pending
            self._start_next()
            checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []

    def _start_next(self) -> None:
        count = self.trainer.world_size
        self.current, self.pending = self.pending[:count], self.pending[count:]
        self.state = TrainingState()
        self.transformed_images = {}

    def _transformed(self, part: str) -> Tensor:
        """Return the images of a part, transformed for the sub-model of this rank: [N, C, H, W]."""
        if part not in self.transformed_images:
            name, images = self.names[self.member_on_this_rank], self.images[part]
            rank_zero_info(f"Transforming {len(images.y):,} images by {name}: {part}")
            changed = images.transformed(self.transforms[name], name, self.seed)
            self.transformed_images[part] = changed
        return self.transformed_images[part]

    @torch.no_grad()
    def _validation_loss(self) -> float:
        if "val" not in self.images:  # a loader of the user: images are numbered as it serves them
            loader: Any = self.trainer.val_dataloaders
            batches = (unpacked(self.unpack(batch)) for batch in loader)
            pairs = ((x, int(y)) for xs, ys, _ in batches for x, y in zip(xs, ys, strict=True))
            served = [(x, y, number) for number, (x, y) in enumerate(pairs)]
            self.images["val"] = TransformedImages(served)
        net, images, y = self.trainable_network(), self._transformed("val"), self.images["val"].y
        losses = []
        with evaluating(net) as net:
            for start in range(0, len(y), CHUNK):
                part = slice(start, start + CHUNK)
                logits = network_logits(net, images[part].to(self.device))
                losses.append(cross_entropy(logits, y[part].to(self.device)))
        return float(torch.cat(losses).double().mean())

    def _has_stopped(self) -> bool:
        return self.state.epochs >= self.epochs or self.state.epochs_since_best >= self.patience

    def _exchange(self) -> None:
        for owner, member in enumerate(self.current if self.trainer.world_size > 1 else ()):
            for tensor in self.members[member].state_dict().values():
                torch.distributed.broadcast(tensor, owner)

    def _conditions(self, member: int) -> dict[str, Any]:
        """Return what a saved sub-model must have been trained with to be loaded."""
        train, trainer = self.trainer.datamodule.parts["train"], self.trainer  # type: ignore[attr-defined]
        digests = [images.digest for images in self.images.values()]
        return {
            "transform": repr(self.transforms[self.names[member]]),
            "net": repr(self.members[member]),
            "images": [len(train), len(train.augmentations), *digests],
            "training": [self.seed, self.epochs, self.patience, str(trainer.limit_train_batches)],
        }

    def _finished_weights(self) -> dict[int, dict[str, Tensor]]:
        """Return the weights of the sub-models in the folder, on rank 0 only."""
        finished: dict[int, dict[str, Tensor]] = {}
        for member, name in enumerate(self.names):
            path = Path(self.folder or "") / f"{name}.pt"
            if self.folder is None or not self.trainer.is_global_zero or not path.exists():
                continue
            content, wanted = read_file(path), self._conditions(member)
            found = content["conditions"]
            if differing := [key for key, value in wanted.items() if found.get(key) != value]:
                raise ValueError(
                    f"{path} was trained otherwise ({', '.join(differing)}): name another "
                    "model.folder, or remove it"
                )
            finished[member] = content["state_dict"]
        return finished
