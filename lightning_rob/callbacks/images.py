"""The images of a validation or test, each once: canonical groups, rounds, or a stream."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluator import (
    EvaluationSettings,
    Evaluator,
    check_indices,
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
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.randomness import Streams


@dataclass(frozen=True)
class Inputs:
    """Which data loader is evaluated, how batches become images; see `EvaluationCallback`."""

    unpack: Unpack | None = None
    preprocess: Callable[..., Any] | None = None
    dataloader_idx: int | None = None

    @property
    def suffix(self) -> str:
        """The end of logged names where there are several data loaders, as Lightning has it."""
        return "" if self.dataloader_idx is None else f"/dataloader_idx_{self.dataloader_idx}"


class Images:
    """The images of one evaluation, each of which one process yields once.

    Images with positions come at the end of the epoch in canonical groups, or in the rounds of a
    protocol: the same images together for any batch size, sampler and order of the loader. A stream
    has no positions; its batches are evaluated as Lightning's loop serves them, unless `max_images`
    of them are drawn. Images are float32, or double under `64-true`.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Any,
        inputs: Inputs,
        settings: EvaluationSettings,
        protocol: RoundProtocol | None = None,
        attacks: int = 1,
    ) -> None:
        self.trainer, self.inputs, self.settings = trainer, inputs, settings
        self.protocol, self.attacks = protocol, attacks
        several, self.place = CombinedLoader(loaders, "sequential").flattened, 0
        if inputs.dataloader_idx or len(several) > 1:
            self.place = -1 if inputs.dataloader_idx is None else inputs.dataloader_idx
        if not 0 <= self.place < len(several):
            raise ValueError(
                f"this evaluates one of {len(several)} data loaders: say which by "
                f"dataloader_idx, 0 to {len(several) - 1}, got {inputs.dataloader_idx}"
            )
        self.loader = several[self.place]
        self.positions = self._chosen()
        self.seen = self.taken = 0
        self.held: list[Tensor] = []
        self.first: tuple[Any, ...] | None = None
        self.expected: int | None = None
        if protocol is None:
            return
        if self.positions is None:
            raise ValueError(
                "a defense that adapts is attacked in rounds of images, a stream has no positions "
                "of them: give a torch.utils.data.DataLoader over a data set with a length"
            )
        if not trainer.sanity_checking:
            protocol.check(self.loader, len(self.positions), trainer.world_size)

    @property
    def grouped(self) -> bool:
        """Whether images are attacked in canonical groups, not as the loader batches them."""
        return self.positions is not None

    @property
    def total(self) -> int | None:
        """The number of attacks on single images by this process; None if it is not known."""
        count = self.settings.max_images if self.positions is None else len(self.positions)
        return count and -(-count // self.trainer.world_size) * self.attacks

    @property
    def metadata(self) -> dict[str, Any]:
        """The fields of a record by which the evaluation can be repeated."""
        several = {} if self.inputs.dataloader_idx is None else {"dataloader_idx": self.place}
        return {
            "stage": "test" if self.trainer.testing else "val",
            **checkpoint_position(self.trainer),
            **several,
            "seed": self.settings.seed,
            "group_size": self.settings.group_size if self.grouped else None,
            "precision": evaluation_precision(),
            "session": SESSION,
            "versions": versions(),
        }

    def metadata_on(self, defense: Defense) -> dict[str, Any]:
        """Return `metadata` with repetitions, and the rounds that are played against a defense."""
        found = self.metadata | self.settings.repetitions
        if self.protocol is None:
            return found
        size = self.protocol.size(self.loader)
        described = self.protocol.describe(defense, size, self.trainer.world_size)
        return found | {"protocol": described, "group_size": size}

    def served(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Batch | None:
        """Return the images of a stream's batch, or two in any sanity check; else None."""
        trainer, sanity = self.trainer, self.trainer.sanity_checking
        if self.grouped and not sanity:
            return None
        loop: Any = trainer._evaluation_loop
        if not loop._is_sequential:  # a batch of each loader, in the structure of the loaders
            loaders = tree_flatten(loop._combined_loader.iterables)[1]
            batch, dataloader_idx = loaders.flatten_up_to(batch)[self.place], self.place
        if dataloader_idx != self.place or batch is None or is_repeated(self.loader, batch_idx):
            return None
        x, y, index = unpacked(batch, self.inputs.unpack)
        # Lightning deals images to the processes in turn.
        place = (self.seen + torch.arange(len(x))) * trainer.world_size + trainer.global_rank
        self.seen += len(x)
        # Copied, for a stream may reuse its buffers.
        x, y = x.to(self._dtype, copy=True), y.clone()
        index = place.to(x.device) if index is None else index.clone()
        self.first = self.first or (float(x.double().sum()), *y.tolist())
        if sanity:
            return x[:2], y[:2], index[:2]
        if self.settings.max_images is None:
            self.taken += len(x)
            return x, y, index
        # The images with the smallest keys are a random choice of all images so far.
        keys = Streams.from_index(place.to(x.device), self.settings.seed).keys
        found = [keys, x, y, index]
        if self.held:
            found = [torch.cat(pair) for pair in zip(self.held, found, strict=True)]
        few = found[0].argsort()[: self.settings.max_images]
        self.held = [part[few] for part in found]
        return None

    def check_shares(self) -> None:
        """Raise ValueError where several processes have the same first batch of a stream."""
        if self.grouped or self.trainer.world_size == 1:
            return
        firsts = [first for first in gather(self.trainer, self.first) if first is not None]
        if len(set(firsts)) < len(firsts):
            raise ValueError(
                f"{len(firsts)} processes are served the same images, so that each would count "
                f"several times: let {type(self.loader).__name__} give each process a part of its "
                "own, such as by torch.utils.data.distributed or by its rank"
            )

    def batches(self) -> Iterator[Batch]:
        """Yield this process's groups or rounds, or its part of the images held of a stream."""
        trainer, unpack, groups = self.trainer, self.inputs.unpack, self.settings.group_size
        if self.positions is None:
            if self.settings.max_images is not None:
                # The smallest keys of all processes are the choice, for any number of them.
                keys = self.held[0].tolist() if self.held else []
                keys = sorted(key for share in gather(trainer, keys) for key in share)
                self.expected = min(len(keys), self.settings.max_images)
                if self.held and self.expected:
                    mine = (self.held[0] <= keys[self.expected - 1]).nonzero()[:, 0]
                    for rows in torch.split(mine[self.held[3][mine].argsort()], groups):
                        x, y, index = (part[rows] for part in self.held[1:])
                        yield x, y, index
            elif trainer.world_size == 1:
                self.expected = self.taken  # another process may repeat images of a stream
            return
        self.expected = len(self.positions)
        share = trainer.global_rank, trainer.world_size
        if self.protocol is not None:
            found = self.protocol.rounds(self.loader, self.positions, *share, unpack)
        else:
            found = self._groups(canonical_groups(self.positions, groups))
        for positions, batch in found:
            # With the hooks of module and data that Lightning calls.
            batch = trainer.lightning_module._on_before_batch_transfer(batch, self.place)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=self.place)
            x, y, index = with_index(batch, positions, unpack)
            yield x.to(self._dtype), y, index

    def _groups(self, groups: list[Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """Yield positions and batches; each process takes the next group when it is ready."""
        trainer = self.trainer
        if trainer.world_size == 1:
            yield from zip(groups, group_loader(self.loader, groups), strict=True)
            return
        # The store that counts outlives the queue, so that each queue needs a name of its own.
        key = trainer.strategy.broadcast(secrets.token_hex(8))
        queue = GroupQueue(groups, key, trainer.global_rank, trainer.world_size)
        for number, batch in enumerate(group_loader(self.loader, queue)):
            yield queue.taken[number], batch

    def result(self, evaluator: Evaluator) -> EvaluationResult:
        """Return the scores of these images on all processes; every process has to call it."""
        found = evaluator.result()
        if self.expected is not None:
            check_indices(found.index, self.expected)
        return found

    def _chosen(self) -> Tensor | None:
        """Return the positions of the images to evaluate, within all limits; None for a stream."""
        trainer, settings, loader = self.trainer, self.settings, self.loader
        processes = trainer.world_size
        # A sampler of the user's may serve other images to each process.
        shares = gather(trainer, served_positions(loader, processes))
        if None in shares:
            return None
        served = torch.tensor(sorted(set().union(*shares)), dtype=torch.int64)
        testing, within = trainer.state.fn == "test", len(served)
        limits: Any = trainer.num_test_batches if testing else trainer.num_val_batches
        batch = loader.batch_size or -(-within // max(len(loader) * processes, 1))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            # A trial run has one round, or one batch.
            size = settings.protocol and settings.protocol.images
            within = min((size or batch) * processes, within)
        elif len(limits) > self.place and limits[self.place] < len(loader):
            within = min(int(limits[self.place] * batch * processes), within)
        return served[choose(len(served), settings.max_images, settings.seed, within)]

    @property
    def _dtype(self) -> torch.dtype:
        """The type to which the trainer's precision casts images, but never below float32."""
        empty = torch.empty(0, dtype=torch.float32)
        cast = self.trainer.precision_plugin.convert_input(empty).dtype
        return torch.promote_types(cast, torch.float32)


def gather(trainer: Trainer, mine: Any) -> list[Any]:
    """Return the value of every process, in the order of ranks."""
    if trainer.world_size == 1:
        return [mine]
    gathered = [None] * trainer.world_size
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def checkpoint_position(trainer: Trainer) -> dict[str, Any]:
    """Return epoch and step of the training, or of the tested checkpoint, and its file."""
    now: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if trainer.state.fn == "fit" or not trainer.ckpt_path:
        return now
    loaded = getattr(trainer.strategy.checkpoint_io, "loaded", None) or {}
    return now | loaded | {"checkpoint": str(trainer.ckpt_path)}
