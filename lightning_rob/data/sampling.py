"""Order of the images on each process: exact resumption in training, no padding in evaluation."""

import sys
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_rob.randomness import generator_of


class ResumePoint(NamedTuple):
    """The place where training continues."""

    epoch: int = 0  # the sampler's number
    batches: int = 0  # of this epoch that are done
    # Lightning's number of the epoch minus the sampler's. With max_steps Lightning gives a new
    # number to an epoch that it resumes, even to one that was over.
    ahead: int = 0


def resume_point(trainer: Trainer | None, last: int | None) -> ResumePoint:
    """Return where the trainer continues; `last` is the sampler's number of the last epoch."""
    if trainer is None:
        return ResumePoint()
    loop: Any = trainer.fit_loop
    coming = loop.epoch_progress.current.processed  # Lightning's number of the coming epoch
    ahead = 0 if last is None else coming - last - int(not loop.restarting)
    batches = 0
    if loop.restarting:
        progress = loop.epoch_loop.batch_progress
        # Not `completed`: saved in on_train_batch_end, it lacks the batch that Lightning will not
        # redo.
        batches = progress.current.processed
        if progress.is_last_batch and batches == progress.current.ready:
            batches = sys.maxsize  # the epoch is over
    return ResumePoint(coming - ahead, batches, ahead)


class EpochSampler(DistributedSampler[int]):
    """Shuffle as a function of (seed, epoch), from any batch of an epoch on.

    It yields `epoch * len(dataset) + position`, so that the data set knows the epoch in any worker.
    The batches of `start` are left out of its epoch only.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int,
        start: ResumePoint,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed)
        self.start = start
        self.done = start.batches * batch_size
        self.epoch = start.epoch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch - self.start.ahead)

    def __iter__(self) -> Iterator[int]:
        assert isinstance(self.dataset, Sized)
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator_of(self.seed, self.epoch))
        order = order.repeat(self.num_replicas)
        keys = order[self.rank : self.total_size : self.num_replicas] + self.epoch * count
        return iter(keys.tolist()[self.done if self.epoch == self.start.epoch else 0 :])


class ResumableLoader(DataLoader[Any]):
    """Training loader that starts its workers at the first batch, after `set_epoch`."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: a plain loader with workers fetches ahead as soon as `iter` is called, which
        # is before Lightning sets the epoch.
        yield from super().__iter__()

    # Lightning takes a loader with a state, even an empty one, for resumable; the resume point
    # itself is in Lightning's counters (see `resume_point`).
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: Lightning's counters are enough."""


def every_image_once(
    dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0
) -> UnrepeatedDistributedSampler:
    """Return a sampler in order that repeats no image, for any number of processes."""
    assert isinstance(dataset, Sized)
    if len(dataset) < num_replicas:  # the others would wait for a process without images
        raise ValueError(f"{len(dataset)} images cannot be shared by {num_replicas} processes")
    return UnrepeatedDistributedSampler(dataset, num_replicas, rank, shuffle=False)
