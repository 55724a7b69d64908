"""What the callbacks that attack the module at validation and test have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.game import images_within_limits
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.evaluation import GROUP_SIZE, canonical_groups, group_loader, serves_once
from lightning_rob.evaluation.records import SESSION, versions
from lightning_rob.precision import float32_precision, in_float32
from lightning_rob.threat import pixels

Kind = TypeVar("Kind")


def at_least_one(**counts: int | None) -> None:
    """Raise a ValueError that names the first count below 1."""
    for name, number in counts.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def with_radius(attacks: Mapping[str, Attack], eps: float | None) -> dict[str, Attack]:
    """The attacks in balls of this radius; as they are if it is None."""
    if eps is None:
        return dict(attacks)
    return {name: attack.rescaled(pixels(eps)) for name, attack in attacks.items()}


def deduplicate_names(mine: Mapping[str, Kind], others: Mapping[str, Kind]) -> dict[str, Kind]:
    """What is not among the others yet; numbered where they use the name for something else."""
    kept: dict[str, Kind] = {}
    for name, item in mine.items():
        if name not in others:
            kept[name] = item
        elif all(item != others[k] for k in others if k == name or k.startswith(f"{name}_")):
            numbered = (f"{name}_{i}" for i in count(2))
            kept[next(key for key in numbered if key not in {*others, *mine})] = item
    return kept


class Evaluation(Callback, ABC):
    """Hands each image of a validation or test to `attack_batch`, once, and then asks to `report`.

    The images come in canonical groups, at the end of the epoch: the same images together whatever
    the batches and their order, and groups, not images, are dealt to the processes. A loader whose
    sampler decides itself what is evaluated is taken batch by batch instead. Images are float32,
    outside autocast and inference mode. The sanity check before training tries two images of each
    batch and reports nothing.

    Args:
        every_n_epochs: evaluate every so many epochs of `fit`.
        max_images: take so many images only, a random choice by the seed; None takes all.
        seed: of that choice and of the evaluation's noise.
        group_size: images that are attacked together.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(
        self,
        every_n_epochs: int,
        max_images: int | None,
        seed: int,
        group_size: int = GROUP_SIZE,
    ) -> None:
        at_least_one(every_n_epochs=every_n_epochs, max_images=max_images, group_size=group_size)
        self.every_n_epochs = every_n_epochs
        self.max_images = max_images
        self.seed = seed
        self.group_size = group_size
        self.loader: Any = None
        self.positions: Tensor | None = None
        self.seen = 0
        self.processes = 1
        self.expected: int | None = None
        self.progress: AttackProgress | None = None
        self.after_group: Callable[[], None] | None = None

    @abstractmethod
    def rounds(self, pl_module: Any) -> int:
        """How often an image is attacked, for the progress bar."""

    @abstractmethod
    def begin(self, trainer: Trainer, pl_module: Any) -> None:
        """Forget the last evaluation."""

    @abstractmethod
    def attack_batch(
        self, trainer: Trainer, pl_module: Any, x: Tensor, y: Tensor, index: Tensor
    ) -> None:
        """Attack images [B, C, H, W] with labels [B] and indices [B]."""

    @abstractmethod
    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log what was found; called on every process."""

    def finish(self, trainer: Trainer, pl_module: Any) -> None:
        """Do what is left when every image has been handed over: mostly nothing."""

    @property
    def in_rounds(self) -> bool:
        """Whether `finish` evaluates all images, in the rounds of a game."""
        return False

    @property
    def grouped(self) -> bool:
        """Whether images are attacked in canonical groups, not as the loader batches them."""
        return serves_once(self.loader, self.processes)

    def due(self, trainer: Trainer) -> bool:
        """Whether this epoch's evaluation is one of ours."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return True
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last evaluation."""
        self._start(trainer, pl_module, trainer.val_dataloaders)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last evaluation."""
        self._start(trainer, pl_module, trainer.test_dataloaders)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Attack the batch."""
        self._take(trainer, pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Attack the batch."""
        self._take(trainer, pl_module, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was found."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was found."""
        self._finish(trainer, pl_module, "test")

    def run_metadata(self, trainer: Trainer, stage: str) -> dict[str, Any]:
        """When it was, and what is needed to repeat it."""
        return {
            "stage": stage,
            **checkpoint_position(trainer),
            "seed": self.seed,
            "group_size": self.group_size if self.grouped else None,
            "precision": _precision(),
            "session": SESSION,
            "versions": versions(),
        }

    def _start(self, trainer: Trainer, pl_module: LightningModule, loaders: Any) -> None:
        if not self.due(trainer):
            return
        loader = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        if not hasattr(loader, "dataset"):
            name = type(self).__name__
            raise ValueError(f"{name} evaluates one data loader at a time, got several")
        self.loader, self.positions, self.seen = loader, None, 0
        self.processes, self.expected = trainer.world_size, None
        images = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        if self.max_images is not None:
            self.positions = self._choose(trainer, images)
            images = images if self.positions is None else len(self.positions)
        if not trainer.sanity_checking:
            total = images and -(-images // trainer.world_size) * self.rounds(pl_module)
            self.progress = AttackProgress(trainer, "Attacking", total)
        with torch.inference_mode(False):  # whose tensors could not be added to outside of it
            self.begin(trainer, pl_module)

    def _choose(self, trainer: Trainer, images: int | None) -> Tensor | None:
        """The positions of `max_images` images, of those within limits on batches; None if all."""
        if images is None:
            raise ValueError("max_images needs a data set that knows its length: leave it out")
        assert self.max_images is not None
        if self.max_images >= images:
            return None
        order = torch.randperm(images, generator=torch.Generator().manual_seed(self.seed))
        if self.grouped:
            size = self.loader.batch_size
            order = order[order < images_within_limits(trainer, self.loader, size)]
        return order[: self.max_images]

    def _take(self, trainer: Trainer, pl_module: Any, batch: Any) -> None:
        """Attack a batch of the sanity check, or of a loader that cannot be regrouped."""
        if not self.due(trainer) or (self.grouped and not trainer.sanity_checking):
            return
        x, y, index = batch
        chosen = self._chosen(trainer, len(x)).to(x.device)
        if not len(chosen):
            return
        with torch.autocast(x.device.type, enabled=False), torch.inference_mode(False):
            x, y, index = x[chosen].float().clone(), y[chosen].clone(), index[chosen].clone()
            self.attack_batch(trainer, pl_module, x, y, index)

    def _groups(self, trainer: Trainer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This process's canonical groups: images [B, C, H, W], labels [B], indices [B]."""
        count = images_within_limits(trainer, self.loader, self.loader.batch_size)
        within = torch.arange(count)
        if self.positions is not None:
            within = self.positions[self.positions < count]
        self.expected = len(within)
        share = trainer.global_rank, trainer.world_size
        for batch in group_loader(self.loader, canonical_groups(within, self.group_size, *share)):
            x, y, index = trainer.strategy.batch_to_device(batch)
            yield x.float(), y, index

    def _chosen(self, trainer: Trainer, count: int) -> Tensor:
        """Positions in the batch; two images are enough to find out that an attack runs."""
        local = torch.arange(count)
        if trainer.sanity_checking:
            return local[:2]
        place = (self.seen + local) * trainer.world_size + trainer.global_rank
        self.seen += count
        return local if self.positions is None else local[torch.isin(place, self.positions)]

    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        concluding = self.due(trainer) and not trainer.sanity_checking
        if concluding:
            with torch.autocast(pl_module.device.type, enabled=False), torch.inference_mode(False):
                if self.grouped and not self.in_rounds:
                    for x, y, index in self._groups(trainer):
                        self.attack_batch(trainer, pl_module, x, y, index)
                        if self.after_group:
                            self.after_group()
                self.finish(trainer, pl_module)
        if self.progress:
            self.progress.close()
            self.progress = None
        if concluding:
            self.report(trainer, pl_module, stage)


def _precision() -> str:
    """The precision of float32 operations in an evaluation."""
    with in_float32():
        return float32_precision()


def checkpoint_position(trainer: Trainer) -> dict[str, Any]:
    """Epoch and step of the training, or those of the checkpoint that is tested, and its file."""
    now: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if trainer.state.fn == "fit" or not trainer.ckpt_path:
        return now
    loaded = getattr(trainer.strategy.checkpoint_io, "loaded", None) or {}
    return now | loaded | {"checkpoint": str(trainer.ckpt_path)}


def run_folder(trainer: Trainer) -> Path | None:
    """The run's folder, None on a trial run and without a logger.

    Every process has to ask, for Lightning makes a collective of it.
    """
    folder = trainer.log_dir
    if trainer.fast_dev_run or not trainer.logger:  # type: ignore[attr-defined]
        return None
    return Path(folder) if folder else None


def writing_folder(trainer: Trainer) -> Path | None:
    """`run_folder` on the process that writes to it, None elsewhere."""
    folder = run_folder(trainer)
    return folder if trainer.is_global_zero else None
