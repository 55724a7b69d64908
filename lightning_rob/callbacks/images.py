"""The images of a validation or test, each once: canonical groups, rounds, or a stream."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluator import (
    EvaluationSettings,
    Evaluator,
    check_indices,
    evaluation_precision,
    spread_over,
)
from lightning_rob.evaluation.groups import (
    Batch,
    Unpack,
    canonical_groups,
    choose,
    fetch,
    group_loader,
    is_repeated,
    regrouped,
    served_positions,
    unpacked,
    with_index,
)
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import SESSION, versions
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.randomness import Streams
from lightning_rob.runtime.processes import gathered


@dataclass(frozen=True)
class Inputs:
    """Which data loader is evaluated, how batches become images; see `EvaluationCallback`."""

    unpack: Unpack | None = None
    preprocess: Callable[..., Any] | None = None
    dataloader_idx: int | None = None


class Images:
    """The images of one evaluation, each of which one process yields once.

    Images with positions come at the end of the epoch in canonical groups, or in the rounds of a
    protocol: the same images together for any batch size, sampler and order of the loader. A stream
    has no positions; it is read again, and each process attacks its images in groups as they come,
    or a random choice of `max_images` of them. Images are float32, or double under `64-true`.
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
        self.expected: int | None = None
        self.stream: Iterator[tuple[Tensor, Tensor, Tensor, Tensor]] = self._numbered()
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
            "group_size": self.settings.group_size,
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

    def batches(self) -> Iterator[Batch]:
        """Yield this process's groups, rounds or batches; two images in a sanity check."""
        trainer, unpack, positions = self.trainer, self.inputs.unpack, self.positions
        if positions is None:
            yield from self._streamed()
            return
        self.expected = len(positions)
        share = trainer.global_rank, trainer.world_size
        found: Iterable[tuple[Tensor, Any]]
        if trainer.sanity_checking:
            found = [(positions[:2], fetch(self.loader, positions[:2]))] if len(positions) else []
        elif self.protocol is not None:
            found = self.protocol.rounds(self.loader, positions, *share, unpack)
        else:
            groups = canonical_groups(positions, self.settings.group_size)
            groups = groups[trainer.global_rank :: trainer.world_size]
            found = zip(groups, group_loader(self.loader, groups), strict=True)
        for places, batch in found:
            x, y, index = with_index(self._transferred(batch), places, unpack)
            yield x.to(self._dtype), y, index

    def first(self, most: int) -> list[Batch]:
        """Return some images of the first group, the same on every process; [] without images.

        Of a stream, this process's first images.
        """
        if self.positions is None:
            start = list(islice(self.stream, 1))
            self.stream = chain(start, self.stream)
            return [(x[:most], y[:most], index[:most]) for x, y, index, _ in start]
        group = self.positions.sort().values[: self.settings.group_size]
        places = group[spread_over(group, most)]
        if not len(places):
            return []
        batch = self._transferred(fetch(self.loader, places))
        x, y, index = with_index(batch, places, self.inputs.unpack)
        return [(x.to(self._dtype), y, index)]

    def _transferred(self, batch: Any) -> Any:
        """Return a batch on the device, after the hooks of module and data that Lightning calls."""
        module, strategy = self.trainer.lightning_module, self.trainer.strategy
        batch = module._on_before_batch_transfer(batch, self.place)
        return strategy.batch_to_device(batch, dataloader_idx=self.place)

    def _numbered(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield images, labels, indices and places of a stream's batches, each image once."""
        trainer, seen = self.trainer, 0
        for number, batch in enumerate(islice(self.loader, self._limit())):
            if is_repeated(self.loader, number):
                return
            x, y, index = unpacked(self._transferred(batch), self.inputs.unpack)
            # Lightning deals images to the processes in turn.
            place = (seen + torch.arange(len(x))) * trainer.world_size + trainer.global_rank
            place, seen = place.to(x.device), seen + len(x)
            # Copied, for a stream may reuse its buffers.
            yield x.to(self._dtype), y.clone(), place if index is None else index.clone(), place

    def _streamed(self) -> Iterator[Batch]:
        """Yield this process's batches of a stream, or of a random choice of its images."""
        trainer, batches, most = self.trainer, self.stream, self.settings.max_images
        start = list(islice(batches, 1))
        # No index says which images a process is served, but their first batch does.
        marks = [(float(x.double().sum()), *y.tolist()) for x, y, *_ in start]
        marks = list(chain(*gathered(marks)))
        kind = type(self.loader).__name__
        if not marks:
            raise ValueError(f"{kind} has no images when it is read again: an iterator ends once")
        if len(set(marks)) < len(marks):
            raise ValueError(
                f"{len(marks)} processes are served the same images, so that each would count "
                f"several times: let {kind} give each process a part of its own, such as by "
                "torch.utils.data.distributed or by its rank"
            )
        if trainer.sanity_checking:
            yield from ((x[:2], y[:2], index[:2]) for x, y, index, _ in start)
            return
        if most is None:
            count, stream = 0, ((x, y, index) for x, y, index, _ in chain(start, batches))
            for batch in regrouped(stream, self.settings.group_size):
                count += len(batch[1])
                yield batch
            # Another process may repeat images of a stream.
            self.expected = count if trainer.world_size == 1 else None
            return
        # The images with the smallest keys of all processes are a random choice, for any number of
        # processes; each holds no more than it may have to give.
        held: list[Tensor] = []
        for x, y, index, place in chain(start, batches):
            found = [Streams.from_index(place, self.settings.seed).keys, x, y, index]
            found = [torch.cat(pair) for pair in zip(held, found, strict=True)] if held else found
            held = [part[found[0].argsort()[:most]] for part in found]
        keys = held[0].tolist() if held else []
        keys = sorted(key for share in gathered(keys) for key in share)[:most]
        self.expected = len(keys)
        if held:
            mine = (held[0] <= keys[-1]).nonzero()[:, 0]
            for rows in torch.split(mine[held[3][mine].argsort()], self.settings.group_size):
                x, y, index = (part[rows] for part in held[1:])
                yield x, y, index

    def _limit(self) -> int | None:
        """Return the number of batches to which the trainer limits this loader, if it does."""
        testing = self.trainer.state.fn == "test"
        limits: Any = self.trainer.num_test_batches if testing else self.trainer.num_val_batches
        finite = len(limits) > self.place and limits[self.place] != float("inf")
        return int(limits[self.place]) if finite else None

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
        shares = gathered(served_positions(loader, processes))
        if None in shares:
            return None
        served = torch.tensor(sorted(set().union(*shares)), dtype=torch.int64)
        within, limit = len(served), self._limit()
        batch = loader.batch_size or -(-within // max(len(loader) * processes, 1))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            # A trial run has one round, or one batch.
            size = settings.protocol and settings.protocol.images
            within = min((size or batch) * processes, within)
        elif limit is not None and limit < len(loader):
            within = min(limit * batch * processes, within)
        return served[choose(len(served), settings.max_images, settings.seed, within)]

    @property
    def _dtype(self) -> torch.dtype:
        """The type to which the trainer's precision casts images, but never below float32."""
        empty = torch.empty(0, dtype=torch.float32)
        cast = self.trainer.precision_plugin.convert_input(empty).dtype
        return torch.promote_types(cast, torch.float32)


def checkpoint_position(trainer: Trainer) -> dict[str, Any]:
    """Return epoch and step of the training, or of the tested checkpoint, and its file."""
    now: dict[str, Any] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    if trainer.state.fn == "fit" or not trainer.ckpt_path:
        return now
    loaded = getattr(trainer.strategy.checkpoint_io, "loaded", None) or {}
    return now | loaded | {"checkpoint": str(trainer.ckpt_path)}
