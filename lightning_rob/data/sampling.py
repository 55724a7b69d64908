"""Which image a process sees when: exact resumption in training, no padding in evaluation."""

import sys
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_rob.randomness import derive_seed


class Start(NamedTuple):
    """Where training goes on: after so many batches of an epoch, which Lightning has `ahead` of it.

    `ahead` is how far Lightning's number of an epoch is above ours: with max_steps it gives a new
    number to the epoch that it takes up again, even to one that was over.
    """

    epoch: int = 0
    batches: int = 0
    ahead: int = 0


def resumption(trainer: Trainer | None, last: int | None) -> Start:
    """Where the trainer, its counters perhaps just restored from a checkpoint, goes on.

    Args:
        trainer: None for a loader of its own.
        last: the epoch that training was in, by our number; None if it was in none.
    """
    if trainer is None:
        return Start()
    loop: Any = trainer.fit_loop
    given = loop.epoch_progress.current.processed  # Lightning's number of the epoch to come
    ahead = 0 if last is None else given - last - int(not loop.restarting)
    batches = _batches_done(loop.epoch_loop.batch_progress) if loop.restarting else 0
    return Start(given - ahead, batches, ahead)


def _batches_done(progress: Any) -> int:
    # Not `completed`: saved in on_train_batch_end, it lacks the batch that Lightning will not redo.
    done: int = progress.current.processed
    return sys.maxsize if progress.is_last_batch and done == progress.current.ready else done


class EpochSampler(DistributedSampler[int]):
    """A shuffle that is a function of (seed, epoch) and can start in the middle of an epoch.

    It yields `epoch * len(dataset) + position`, so that the data set knows the epoch in any worker.

    Args:
        dataset: the images to shuffle.
        batch_size: images a process takes at a time, to count the images it has seen.
        seed: names the shuffles.
        start: where to start; its batches are left out of its epoch only.
        num_replicas: processes that share the images.
        rank: which of them this is.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        start: Start,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed)
        self.start = start
        self.seen = start.batches * batch_size
        self.epoch = start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch from Lightning, which calls this before every epoch."""
        super().set_epoch(epoch - self.start.ahead)

    def __iter__(self) -> Iterator[int]:
        """This process's images of this epoch, in order."""
        assert isinstance(self.dataset, Sized)
        count = len(self.dataset)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(count, generator=generator).repeat(self.num_replicas)
        mine = order[self.rank : self.total_size : self.num_replicas] + self.epoch * count
        return iter(mine.tolist()[self.seen if self.epoch == self.start.epoch else 0 :])


class ResumableLoader(DataLoader[Any]):
    """A training loader that starts at its first batch, when Lightning has set the epoch.

    A plain loader with workers fetches ahead as soon as `iter` is called, which is before
    `set_epoch`. Having a state, if an empty one, is how Lightning knows a loader to be resumable;
    the place to resume at is in its own counters (see `resumption`).
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of an epoch, its workers started by the first."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's counters say it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def every_image_once(
    dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0
) -> UnrepeatedDistributedSampler:
    """A sampler in order that repeats no image, whatever the number of processes.

    Raises:
        ValueError: a process would be left without an image, and its peers would wait for it.
    """
    assert isinstance(dataset, Sized)
    if len(dataset) < num_replicas:
        raise ValueError(f"{len(dataset)} images cannot be shared by {num_replicas} processes")
    return UnrepeatedDistributedSampler(dataset, num_replicas, rank, shuffle=False)
