"""Training of transformation ensembles: each member sees images changed by its transformation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_rob.attacks import evaluating
from lightning_rob.data.base import ImageData, IndexedSubset, Sample
from lightning_rob.defenses.network import network_logits
from lightning_rob.defenses.transform_ensemble import TransformEnsemble, transformed
from lightning_rob.evaluation.groups import unpacked
from lightning_rob.modules.base import RobustModule
from lightning_rob.objectives import classification_loss, cross_entropy
from lightning_rob.randomness import Streams
from lightning_rob.rules import Rule, mean_probs
from lightning_rob.runtime.errors import at_least
from lightning_rob.transforms import Transform
from lightning_rob.transforms.pool import chosen

CHUNK = 256  # images at a time, so that memory stays flat


@dataclass
class TrainingState:
    """Early stopping of the sub-model in training."""

    epochs: int = 0
    best_loss: float = math.inf  # on the validation images
    epochs_since_best: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    finished: bool = False

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


class TransformTraining(RobustModule):
    """Train a sub-model for each transformation, one after another (Meng et al. 2020, "Athena").

    A sub-model is trained on transformed images until its cross-entropy on transformed validation
    images has not fallen for `patience` epochs; then its best weights are restored. `defense` is
    the ensemble of the sub-models whose training has started.

    Training images without augmentation are transformed once, by a random stream keyed by image;
    augmented images, and those of a loader that is not of this package, anew in every epoch.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per sub-model.
        transforms: names of `lightning_rob.transforms.pool`, or expressions for several of them,
            such as "reversible", "14r+28i" or ["clean", "flip_both"].
        epochs: maximum number of epochs of a sub-model; `trainer.max_epochs` must allow for all.
        patience: number of epochs without a lower validation loss after which a sub-model stops.
        rule: turns the sub-models' logits into a prediction.
        **options: arguments of `RobustModule`; optimizer and schedule restart for each sub-model.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        transforms: list[str] | str = "reversible",
        epochs: int = 50,
        patience: int = 3,
        rule: Rule = mean_probs,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(1, epochs=epochs, patience=patience)
        self.transforms = chosen(transforms)
        self.names = list(self.transforms)
        self.members = nn.ModuleList(net() for _ in self.names)
        self.epochs, self.patience, self.rule = epochs, patience, rule
        self.current, self.pending = -1, list(range(len(self.names)))
        self.state = TrainingState()
        self.images: dict[str, TransformedImages] = {}
        self.transformed_images: dict[str, Tensor] = {}

    @property
    def keeps_best(self) -> bool:
        return True

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

    def trainable_network(self) -> nn.Module:
        return self.members[self.current]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return classification_loss(network_logits(self.trainable_network(), x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = self.indexed(batch, batch_idx)
        if "train" in self.images:  # transformed once
            x = self._transformed("train")[self.images["train"].positions(index)].to(x.device)
        else:
            name = self.names[self.current]
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
        self.pending = list(range(len(self.names)))
        self._start_next()

    def on_train_start(self) -> None:
        trainer: Any = self.trainer
        # The current sub-model may be partly done.
        needed = self.epochs * (1 + len(self.pending)) - self.state.epochs
        needed, most = self.current_epoch + needed, trainer.max_epochs
        trainer.should_stop |= self.state.finished and not self.pending
        if not (trainer.should_stop or trainer.fast_dev_run) and most != -1 and most < needed:
            raise MisconfigurationException(
                f"trainer.max_epochs must be at least {needed}, {self.epochs} for each sub-model, "
                f"or -1, got {most}; for a shorter training change model.epochs too"
            )
        if (trainer.check_val_every_n_epoch, trainer.val_check_interval) != (1, 1.0):
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss of every epoch: leave "
                "trainer.check_val_every_n_epoch and trainer.val_check_interval at 1"
            )

    def epochs_of_optimizer(self) -> float:
        return self.epochs

    def on_train_epoch_start(self) -> None:
        if self.state.finished:
            self._start_next()
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            return
        # All processes stop by the loss of one: theirs may differ by rounding.
        loss = self.trainer.strategy.broadcast(self._validation_loss())
        self.log(f"val/loss/{self.names[self.current]}", loss, sync_dist=True)
        state = self.state
        state.update(loss, self.trainable_network())
        state.finished = state.epochs >= self.epochs or state.epochs_since_best >= self.patience
        if state.finished and not state.best_weights:
            raise ValueError(f"the validation loss is no number: {self.names[self.current]}")

    def on_train_epoch_end(self) -> None:
        if not self.state.epochs:
            raise MisconfigurationException(
                "TransformTraining stops by the validation loss: validate after every epoch, "
                "leave trainer.limit_val_batches above 0"
            )
        if self.state.finished:  # before a checkpoint is written
            self.trainable_network().load_state_dict(self.state.best_weights)
            self.trainer.should_stop |= not self.pending

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["transform_training"] = {
            "current": [self.current],
            "pending": self.pending,
            "state": asdict(self.state),
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
        # Earlier versions trained several at a time, or none that were there already.
        self.current, *others = saved["current"] or [-1]
        self.pending = others + saved["pending"]
        self.state = TrainingState(**saved["state"])
        fits = self._trainer is not None and self.trainer.state.fn == "fit"
        if fits and self.state.finished and self.pending:
            self._start_next()
            checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []

    def _start_next(self) -> None:
        self.current, *self.pending = self.pending
        self.state = TrainingState()
        self.transformed_images = {}

    def _transformed(self, part: str) -> Tensor:
        """Return the images of a part, transformed for the current sub-model: [N, C, H, W]."""
        if part not in self.transformed_images:
            name, images = self.names[self.current], self.images[part]
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
