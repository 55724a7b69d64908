"""Base class of the callbacks that attack the module at validation and test: hooks to batches."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.utils._pytree import tree_flatten

from lightning_rob.callbacks.collector import Collector, collector_of
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import reporting_adaptation
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
    is_repeated,
    served_positions,
    unpacked,
    with_index,
)
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import SESSION, versions
from lightning_rob.randomness import Streams, own_streams
from lightning_rob.runtime.errors import at_least

SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


class EvaluationCallback(Callback, ABC):
    """Hands each image of a validation or test to `attack_batch` once, and then calls `report`.

    The images come at the end of the epoch in canonical groups, or in the rounds of a protocol:
    the same images together whatever the loader's batches, sampler and order. Each process takes
    the next group when it has finished its last. A stream, whose images have no positions, is
    evaluated batch by batch instead. Images are float32, or double under `64-true`, outside
    autocast and inference mode, and the global random streams are left as they were. The sanity
    check before training tries two images of each batch and reports nothing.

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
        self.positions: Tensor | None = None
        self.held: list[Tensor] = []
        self.first: tuple[Any, ...] | None = None
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
        return self.positions is not None

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
        place = self.dataloader_idx or 0
        loop: Any = trainer._evaluation_loop
        if not loop._is_sequential:  # a batch of each loader, in the structure of the loaders
            loaders = tree_flatten(loop._combined_loader.iterables)[1]
            batch, dataloader_idx = loaders.flatten_up_to(batch)[place], place
        if dataloader_idx == place and not (batch is None or is_repeated(self.loader, batch_idx)):
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
        """Refuse trainers in which nothing can be measured; order the callbacks.

        Raises:
            MisconfigurationException: FSDP, DeepSpeed or tensor parallelism, under which a process
                has no whole network; a trainer that logs nothing, or one of `pytorch_lightning`.
        """
        if not isinstance(pl_module, LightningModule):
            raise MisconfigurationException(
                f"{type(self).__name__} is for trainers and modules of the package lightning, got "
                f"{type(pl_module).__name__} of another, such as pytorch_lightning: write "
                "`import lightning.pytorch as pl`"
            )
        if trainer.barebones:
            raise MisconfigurationException(
                f"Trainer(barebones=True) logs nothing, so {type(self).__name__} would attack for "
                "nothing: leave one of them out"
            )
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
        self.loader = self._select(loaders)
        self.seen = self.taken = 0
        self.held, self.first, self.expected = [], None, None
        self.processes = trainer.world_size
        self.positions = self._chosen(trainer)
        if not trainer.sanity_checking:
            images = self.settings.max_images if self.positions is None else len(self.positions)
            total = images and -(-images // trainer.world_size) * self.attack_count(pl_module)
            self.progress = AttackProgress(trainer, "Attacking", total)
        with torch.inference_mode(False):  # whose tensors could not be added to outside of it
            self.protocol = self.begin(trainer, pl_module)
        if self.protocol is None:
            return
        if self.positions is None:
            raise ValueError(
                "a defense that adapts is attacked in rounds of images, a stream has no positions "
                "of them: give a torch.utils.data.DataLoader over a data set with a length"
            )
        if not trainer.sanity_checking:
            self.protocol.check(self.loader, len(self.positions), trainer.world_size)

    def _chosen(self, trainer: Trainer) -> Tensor | None:
        """Return the positions of the images to evaluate, within all limits; None for a stream."""
        shares = gather(trainer, served_positions(self.loader, trainer.world_size))
        if None in shares:
            return None
        served = torch.tensor(sorted(set().union(*shares)), dtype=torch.int64)
        settings, place = self.settings, self.dataloader_idx or 0
        size = settings.protocol.images if settings.protocol else None
        within = images_within_limits(trainer, self.loader, len(served), size, place)
        return served[choose(len(served), settings.max_images, settings.seed, within)]

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

    def _take(self, trainer: Trainer, pl_module: Any, batch: Any) -> None:
        """Attack a batch of the sanity check or of a stream, or hold some of a stream's images."""
        if not self.due(trainer) or (self.grouped and not trainer.sanity_checking):
            return
        x, y, index = unpacked(batch, self.unpack)
        place = (self.seen + torch.arange(len(x))) * trainer.world_size + trainer.global_rank
        self.seen += len(x)
        with self._apart(pl_module):
            # Copied, for a stream may reuse its buffers.
            x, y = x.to(self._dtype(trainer), copy=True), y.clone()
            index = place.to(x.device) if index is None else index.clone()
            self.first = self.first or (float(x.double().sum()), *y.tolist())
            if trainer.sanity_checking:  # two images are enough to find out that an attack runs
                self.attack_batch(trainer, pl_module, (x[:2], y[:2], index[:2]))
            elif self.settings.max_images is not None:
                self._hold(place.to(x.device), x, y, index)
            else:
                self.taken += len(x)
                self.attack_batch(trainer, pl_module, (x, y, index))

    def _hold(self, place: Tensor, *rows: Tensor) -> None:
        """Keep a random choice of a stream's images so far: those of the smallest keys."""
        found = [Streams.from_index(place, self.settings.seed).keys, *rows]
        if self.held:
            found = [torch.cat(pair) for pair in zip(self.held, found, strict=True)]
        few = found[0].argsort()[: self.settings.max_images]
        self.held = [part[few] for part in found]

    def _held_groups(self, trainer: Trainer) -> Iterator[Batch]:
        """Yield this process's part of the images chosen from a stream, in groups."""
        keys = sorted(key for share in gather(trainer, self._keys()) for key in share)
        self.expected = min(len(keys), self.settings.max_images or 0)
        if not self.held or not self.expected:
            return
        mine = (self.held[0] <= keys[self.expected - 1]).nonzero()[:, 0]
        mine = mine[self.held[3][mine].argsort()]
        for group in torch.split(mine, self.settings.group_size):
            x, y, index = (part[group] for part in self.held[1:])
            yield x, y, index

    def _keys(self) -> list[int]:
        return self.held[0].tolist() if self.held else []

    def _batches(self, trainer: Trainer) -> Iterator[Batch]:
        """This process's canonical groups or rounds, or what is held of a stream."""
        if self.positions is None:
            if self.settings.max_images is not None:
                yield from self._held_groups(trainer)
            return
        share = trainer.global_rank, trainer.world_size
        if self.protocol is not None:
            found = self.protocol.rounds(self.loader, self.positions, *share, self.unpack)
        else:
            found = self._groups(trainer, self.positions)
        self.expected = len(self.positions)
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
        return x.to(self._dtype(trainer)), y, index

    def _dtype(self, trainer: Trainer) -> torch.dtype:
        """The type to which the trainer's precision casts images, but never below float32."""
        cast = trainer.precision_plugin.convert_input(torch.empty(0, dtype=torch.float32)).dtype
        return torch.promote_types(cast, torch.float32)

    @contextmanager
    def _apart(self, pl_module: Any) -> Iterator[None]:
        """Leave autocast, inference mode and the global random streams, from which training draws.

        In a training loop a data set, a network or an attack would draw on training's account.
        """
        device = pl_module.device
        with (
            own_streams(self.settings.seed, device),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
        ):
            yield

    def _finish(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if not self.due(trainer):
            return
        self._check_shares(trainer)
        if trainer.sanity_checking:
            return
        show = self.progress.show if self.progress and self.progress.rich else None
        with (
            self._apart(pl_module),
            reporting_adaptation(self.defense_of(pl_module), show),
        ):
            for batch in self._batches(trainer):
                self.attack_batch(trainer, pl_module, batch)
        if self.expected is None and trainer.world_size == 1:
            self.expected = self.taken  # another process may repeat images of a stream
        if self.progress:
            self.progress.close()
            self.progress = None
        self.report(trainer, pl_module, stage)

    def _check_shares(self, trainer: Trainer) -> None:
        """Raise ValueError where several processes have the same first batch of a stream."""
        if self.grouped or trainer.world_size == 1:
            return
        firsts = [first for first in gather(trainer, self.first) if first is not None]
        if len(set(firsts)) < len(firsts):
            raise ValueError(
                f"{len(firsts)} processes are served the same images, so that each would count "
                f"several times: let {type(self.loader).__name__} give each process a part of its "
                "own, such as by torch.utils.data.distributed or by its rank"
            )


def gather(trainer: Trainer, mine: Any) -> list[Any]:
    """Return the value of every process, in the order of ranks."""
    if trainer.world_size == 1:
        return [mine]
    gathered = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def _move_averaging_behind(trainer: Trainer) -> None:
    """Put weight averaging behind all evaluations: it takes its weights back at an epoch's end."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averaging = [c for c in callbacks if isinstance(c, WeightAveraging)]
    if averaging:
        others = [c for c in callbacks if c not in averaging]
        places = (i for i, c in enumerate(others) if isinstance(c, EvaluationCallback))
        place = 1 + max(places, default=-1)
        trainer.callbacks = [*others[:place], *averaging, *others[place:]]  # type: ignore[attr-defined]


def images_within_limits(
    trainer: Trainer, loader: Any, images: int, round_size: int | None = None, place: int = 0
) -> int:
    """Return how many images `limit_val_batches` and the like leave; a trial run has one round.

    Args:
        trainer: its limits hold.
        loader: serves the images.
        images: how many it serves on all processes.
        round_size: images of a round; None is a batch.
        place: of the loader among several.
    """
    processes = trainer.world_size
    batch = loader.batch_size or -(-images // max(len(loader) * processes, 1))
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return min((round_size or batch) * processes, images)
    testing = trainer.state.fn == "test"
    limits: Any = trainer.num_test_batches if testing else trainer.num_val_batches
    if len(limits) <= place or limits[place] >= len(loader):
        return images
    return min(int(limits[place] * batch * processes), images)


def checkpoint_position(trainer: Trainer) -> dict[str, Any]:
    """Return epoch and step of the training, or those of the tested checkpoint, and its file."""
    now: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if trainer.state.fn == "fit" or not trainer.ckpt_path:
        return now
    loaded = getattr(trainer.strategy.checkpoint_io, "loaded", None) or {}
    return now | loaded | {"checkpoint": str(trainer.ckpt_path)}
