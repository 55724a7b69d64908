"""Base class of the callbacks that attack the module at validation and test: hooks to batches."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from lightning_rob.callbacks.collector import Collector, collector_of
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import reporting_adaptation
from lightning_rob.errors import at_least
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.evaluator import (
    EvaluationSettings,
    evaluation_precision,
)
from lightning_rob.evaluation.groups import (
    Batch,
    GroupQueue,
    Unpack,
    canonical_groups,
    choose,
    group_loader,
    serves_once,
    unpacked,
    with_index,
)
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import SESSION, versions

SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


class EvaluationCallback(Callback, ABC):
    """Hands each image of a validation or test to `attack_batch` once, and then calls `report`.

    The images come at the end of the epoch in canonical groups, or in the rounds of a protocol:
    the same images together whatever the loader's batches and their order. Each process takes the
    next group when it has finished its last. A loader whose sampler decides itself which images are
    evaluated is evaluated batch by batch instead. Images are float32, outside autocast and
    inference mode. The sanity check before training tries two images of each batch and reports
    nothing.

    Args:
        settings: seed, number of images, size of groups.
        every_n_epochs: evaluate in every n-th epoch of `fit`.
        unpack: function of a batch that returns (images, labels) or (images, labels, indices),
            images in [0, 1]; None takes batches that are so already.
        preprocess: what is applied to images before a plain network, such as a normalization;
            attacks go through its gradient.
        dataloader_idx: which of several data loaders is evaluated; None refuses several.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        every_n_epochs: int = 1,
        unpack: Unpack | None = None,
        preprocess: Callable[..., Any] | None = None,
        dataloader_idx: int | None = None,
    ) -> None:
        at_least(1, every_n_epochs=every_n_epochs)
        self.settings = settings
        self.every_n_epochs = every_n_epochs
        self.unpack = unpack
        self.preprocess = preprocess
        self.dataloader_idx = dataloader_idx
        self.loader: Any = None
        self.protocol: RoundProtocol | None = None
        self.chosen: Tensor | None = None
        self.seen = self.taken = 0
        self.expected: int | None = None
        self.processes = 1
        self.progress: AttackProgress | None = None

    @abstractmethod
    def attack_count(self, pl_module: Any) -> int:
        """Return how often an image is attacked, for the progress bar."""

    @abstractmethod
    def begin(self, trainer: Trainer, pl_module: Any) -> RoundProtocol | None:
        """Forget the last evaluation; return the rounds of this one, None for canonical groups."""

    @abstractmethod
    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch) -> None:
        """Attack a batch: images [B, C, H, W], labels [B] and indices [B]."""

    @abstractmethod
    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log the results; called on every process."""

    @property
    def inputs(self) -> dict[str, Any]:
        """How batches become images, as arguments of another callback."""
        names = ("unpack", "preprocess", "dataloader_idx")
        return {name: getattr(self, name) for name in names}

    @property
    def suffix(self) -> str:
        """The end of logged names where there are several data loaders, as Lightning has it."""
        return "" if self.dataloader_idx is None else f"/dataloader_idx_{self.dataloader_idx}"

    @property
    def grouped(self) -> bool:
        """Whether images are attacked in canonical groups, not as the loader batches them."""
        return serves_once(self.loader, self.processes)

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch."""
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
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Attack the batch, if images cannot be grouped."""
        if dataloader_idx == (self.dataloader_idx or 0):
            self._take(trainer, pl_module, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack all groups, and log the results."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attack all groups, and log the results."""
        self._finish(trainer, pl_module, "test")

    def run_metadata(self, trainer: Trainer, stage: str) -> dict[str, Any]:
        """Return what is needed to repeat the evaluation."""
        several = {} if self.dataloader_idx is None else {"dataloader_idx": self.dataloader_idx}
        return {
            "stage": stage,
            **checkpoint_position(trainer),
            **several,
            "seed": self.settings.seed,
            "group_size": self.settings.group_size if self.grouped else None,
            "precision": evaluation_precision(),
            "session": SESSION,
            "versions": versions(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep averaged weights for a test or validation: Lightning would take the others back.

        It does so if the same trainer has fitted with a `WeightAveraging` callback.
        """
        if trainer.state.fn != "fit" and "current_model_state" in checkpoint:
            checkpoint["current_model_state"] = checkpoint["state_dict"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies under which a process has no whole network; order the callbacks.

        Raises:
            MisconfigurationException: FSDP, DeepSpeed or tensor parallelism.
        """
        if isinstance(trainer.strategy, SHARDED):
            raise MisconfigurationException(
                f"{type(self).__name__} attacks whole networks, {type(trainer.strategy).__name__} "
                "shards them: train with strategy ddp, or leave the callback out and call "
                "lightning_rob.evaluate on the saved network afterwards"
            )
        if stage == "fit" and not is_overridden("validation_step", pl_module):
            rank_zero_warn(
                f"{type(self).__name__} measures nothing in fit: {type(pl_module).__name__} has no "
                "validation_step, which may be empty (`pass`)"
            )
        if stage == "fit" and 0 < (trainer.max_epochs or 0) < self.every_n_epochs:
            rank_zero_info(
                f"{type(self).__name__} attacks in every {self.every_n_epochs}th epoch of a fit, "
                f"so in none of these {trainer.max_epochs}: lower its every_n_epochs, or test "
                "afterwards"
            )
        _move_averaging_behind(trainer)
        if self in trainer.callbacks:  # type: ignore[attr-defined]
            self.collector(trainer).forget_others(trainer.callbacks)  # type: ignore[attr-defined]

    def log_value(self, pl_module: Any, name: str, value: Any, prog_bar: bool = False) -> None:
        """Log a value, by a name that holds the data loader if there are several."""
        # Lightning would add the loader of the batch that came last.
        options = {"sync_dist": True, "add_dataloader_idx": False, "prog_bar": prog_bar}
        pl_module.log(name + self.suffix, value, **options)

    def defense_of(self, pl_module: Any) -> Defense:
        """Return the module's `defense`, or the module itself as a network, in `Single`."""
        return as_defense(pl_module, self.preprocess)

    def collector(self, trainer: Trainer) -> Collector:
        """Return what the callbacks of this kind in the run have found together."""
        kinds = (kind for kind in type(self).__mro__ if kind.__module__.startswith(__package__))
        return collector_of(trainer, next(kinds), self.dataloader_idx)

    def _start(self, trainer: Trainer, pl_module: LightningModule, loaders: Any) -> None:
        if not self.due(trainer):
            return
        self.loader = loader = self._select(loaders)
        self.chosen = None
        self.seen = self.taken = 0
        self.processes, self.expected = trainer.world_size, None
        images = self._served()
        if self.settings.max_images is not None:
            if images is None:
                raise ValueError("max_images needs a data set that knows its length: leave it out")
            place = self.dataloader_idx or 0
            within = images_within_limits(trainer, loader, loader.batch_size, place)
            if not self.grouped:  # its batches are not those of the data set
                within = images
            if self.settings.max_images < images:
                number, seed = self.settings.max_images, self.settings.seed
                self.chosen = choose(images, number, seed, within)
                images = len(self.chosen)
        if not trainer.sanity_checking:
            total = images and -(-images // trainer.world_size) * self.attack_count(pl_module)
            self.progress = AttackProgress(trainer, "Attacking", total)
        with torch.inference_mode(False):  # whose tensors could not be added to outside of it
            self.protocol = self.begin(trainer, pl_module)
        if self.protocol is not None and not self.grouped:
            raise ValueError(
                "a defense that adapts is attacked in rounds of images that the loader serves once "
                "each: give a part of them as torch.utils.data.Subset, not by a sampler"
            )
        if self.protocol is not None and not trainer.sanity_checking:
            order = self._positions(trainer, self.protocol.size(loader))
            self.protocol.check(loader, len(order), trainer.world_size)

    def _select(self, loaders: Any) -> Any:
        """Return the data loader to evaluate."""
        several = CombinedLoader(loaders, "sequential").flattened
        place = 0 if len(several) == 1 and not self.dataloader_idx else self.dataloader_idx
        if place is None or not 0 <= place < len(several):
            raise ValueError(
                f"{type(self).__name__} evaluates one of {len(several)} data loaders: say which by "
                f"dataloader_idx, 0 to {len(several) - 1}, got {place}"
            )
        return several[place]

    def _served(self) -> int | None:
        """Return how many images the loader serves on all processes; None if it cannot be known."""
        if not hasattr(self.loader.dataset, "__len__"):
            return None
        stream = isinstance(self.loader.dataset, IterableDataset)
        if stream or self.grouped or type(self.loader.batch_sampler) is not BatchSampler:
            return len(self.loader.dataset)
        return len(self.loader.sampler) * self.processes

    def _take(self, trainer: Trainer, pl_module: Any, batch: Any) -> None:
        """Attack a batch of the sanity check, or of a loader that cannot be regrouped."""
        if not self.due(trainer) or (self.grouped and not trainer.sanity_checking):
            return
        x, y, index = unpacked(batch, self.unpack)
        count = len(x)
        place = (self.seen + torch.arange(count)) * trainer.world_size + trainer.global_rank
        self.seen += count
        part = torch.arange(count)
        if trainer.sanity_checking:
            part = part[:2]  # two images are enough to find out that an attack runs
        elif self.chosen is not None:
            part = part[torch.isin(place, self.chosen)]
        if not len(part):
            return
        self.taken += len(part)
        index = place.to(x.device) if index is None else index
        with torch.autocast(x.device.type, enabled=False), torch.inference_mode(False):
            rows = [each[part.to(x.device)].clone() for each in (x.float(), y, index)]
            self.attack_batch(trainer, pl_module, (rows[0], rows[1], rows[2]))

    def _batches(self, trainer: Trainer) -> Iterator[Batch]:
        """This process's canonical groups or rounds."""
        share = trainer.global_rank, trainer.world_size
        if self.protocol is not None:
            order = self._positions(trainer, self.protocol.size(self.loader))
            found = self.protocol.rounds(self.loader, order, *share, self.unpack)
        else:
            order = self._positions(trainer, self.loader.batch_size)
            found = self._groups(trainer, order)
        self.expected = len(order)
        for positions, batch in found:
            yield self._transferred(trainer, batch, positions)

    def _groups(self, trainer: Trainer, order: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """Yield positions and batches; each process takes the next group when it is ready."""
        groups = canonical_groups(order, self.settings.group_size)
        if trainer.world_size == 1:
            yield from zip(groups, group_loader(self.loader, groups), strict=True)
            return
        key = trainer.strategy.broadcast(secrets.token_hex(8))
        queue = GroupQueue(groups, key, trainer.global_rank, trainer.world_size)
        for number, batch in enumerate(group_loader(self.loader, queue)):
            yield queue.taken[number], batch

    def _transferred(self, trainer: Trainer, batch: Any, positions: Tensor) -> Batch:
        """Move a batch to the device, with the hooks of module and data that Lightning calls."""
        place, module = self.dataloader_idx or 0, trainer.lightning_module
        batch = module._on_before_batch_transfer(batch, place)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=place)
        x, y, index = with_index(batch, positions, self.unpack)
        return x.float(), y, index

    def _positions(self, trainer: Trainer, size: int) -> Tensor:
        """The images to evaluate, within the trainer's limits on batches of this size."""
        count = images_within_limits(trainer, self.loader, size, self.dataloader_idx or 0)
        if self.chosen is None:
            return torch.arange(count)
        if self.protocol is not None:  # whole rounds
            return self.chosen[:count]
        return self.chosen[self.chosen < count]

    def _finish(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if not self.due(trainer) or trainer.sanity_checking:
            return
        with torch.autocast(pl_module.device.type, enabled=False), torch.inference_mode(False):
            if self.grouped:
                show = self.progress.show if self.progress and self.progress.rich else None
                with reporting_adaptation(self.defense_of(pl_module), show):
                    for batch in self._batches(trainer):
                        self.attack_batch(trainer, pl_module, batch)
        stream = isinstance(self.loader.dataset, IterableDataset)
        if stream and trainer.world_size == 1:  # a sampler or another process may repeat an image
            self.expected = self.taken
        if self.progress:
            self.progress.close()
            self.progress = None
        self.report(trainer, pl_module, stage)


def _move_averaging_behind(trainer: Trainer) -> None:
    """Put weight averaging behind all evaluations: it takes its weights back at an epoch's end."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = [c for c in callbacks if isinstance(c, WeightAveraging)]
    if averaging:
        others = [c for c in callbacks if c not in averaging]
        places = (i for i, c in enumerate(others) if isinstance(c, EvaluationCallback))
        place = 1 + max(places, default=-1)
        trainer.callbacks = [*others[:place], *averaging, *others[place:]]  # type: ignore[attr-defined]


def images_within_limits(trainer: Trainer, loader: Any, size: int, place: int = 0) -> int:
    """Return how many images `limit_val_batches` and the like leave; a trial run has one round.

    Args:
        trainer: its limits hold.
        loader: its data set is evaluated.
        size: images of a round.
        place: of the loader among several.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return min(int(size * trainer.world_size), len(loader.dataset))
    testing = trainer.state.fn == "test"
    limits: Any = trainer.num_test_batches if testing else trainer.num_val_batches
    if len(limits) <= place or limits[place] >= len(loader):
        return len(loader.dataset)
    return min(int(limits[place] * loader.batch_size * trainer.world_size), len(loader.dataset))


def checkpoint_position(trainer: Trainer) -> dict[str, Any]:
    """Return epoch and step of the training, or those of the tested checkpoint, and its file."""
    now: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if trainer.state.fn == "fit" or not trainer.ckpt_path:
        return now
    loaded = getattr(trainer.strategy.checkpoint_io, "loaded", None) or {}
    return now | loaded | {"checkpoint": str(trainer.ckpt_path)}
