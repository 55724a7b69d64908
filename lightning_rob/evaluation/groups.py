"""Canonical groups: the same images are attacked together whatever the batches and the ranks.

The rounding of a matrix product depends on its shape, so an image alone and the same image in a
batch may get other logits in the last bit, and another adversarial image. An evaluation therefore
cuts the data set into groups by position; processes share groups, not images.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_rob.attacks.base import check_label_type

GROUP_SIZE = 128
Batch = tuple[Tensor, Tensor, Tensor]
Unpack = Callable[[Any], Any]


def canonical_groups(positions: Tensor, size: int = GROUP_SIZE) -> list[Tensor]:
    """Return the groups of images that are attacked together.

    Args:
        positions: [N] places in the data set, in any order.
        size: images in a group; the last one may have fewer.

    Returns:
        The sorted positions, cut into groups.

    Raises:
        ValueError: groups without images.
    """
    if size < 1:
        raise ValueError(f"group_size must be at least 1, got {size}")
    return list(torch.split(positions.sort().values, size)) if len(positions) else []


class GroupQueue:
    """The groups of an evaluation, of which each process takes the next one when it is ready.

    Attacks take longer on images that resist them, so that groups dealt beforehand would leave
    some processes waiting for others. Only the first group of a process is that of its rank. Which
    process attacks a group changes nothing in its results.

    Args:
        groups: positions [n] of each group, the same on every process.
        key: name of this queue, the same on every process and used once.
        rank: number of this process.
        world_size: how many processes share the groups; they are in one process group of
            `torch.distributed`, whose store counts.

    Raises:
        ValueError: this process is in no process group.

    Attributes:
        taken: groups that this process has taken.
    """

    def __init__(self, groups: list[Tensor], key: str, rank: int, world_size: int) -> None:
        self.groups = groups
        self.rank, self.world_size = rank, world_size
        self.taken: list[Tensor] = []
        self._key = f"lightning-rob groups {key}"
        group = torch.distributed.group.WORLD
        if group is None:
            raise ValueError(f"{world_size} processes share groups after init_process_group only")
        self._store = group.get_group_store()

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        number = self.rank
        while number < len(self.groups):
            self.taken.append(self.groups[number])
            yield self.taken[-1].tolist()
            number = self.world_size + self._store.add(self._key, 1) - 1


def serves_once(loader: Any, world_size: int = 1) -> bool:
    """Return whether a loader serves every image of its data set once, in any order.

    Only then can images be fetched by position instead. An `IterableDataset` has no positions; a
    sampler that weights, repeats or leaves out images, and a loader with an `__iter__` of its own,
    decide themselves what is evaluated.

    Args:
        loader: as a process has it.
        world_size: how many processes share the images.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__ or loader.batch_size is None:
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    return _in_any_order(loader.sampler, loader.dataset, world_size)


def _in_any_order(sampler: Any, dataset: Any, world_size: int) -> bool:
    if isinstance(sampler, DistributedSampler):
        # Lightning puts a loader's own sampler behind a distributed one, as its data set.
        inside = getattr(sampler.dataset, "_sampler", None)
        served = sampler.dataset is dataset or _in_any_order(inside, dataset, 1)
        return served and sampler.num_replicas == world_size
    if type(sampler) is RandomSampler:
        served = not sampler.replacement and len(sampler) == len(dataset)
        return served and sampler.data_source is dataset
    return type(sampler) is SequentialSampler and sampler.data_source is dataset


def group_loader(loader: DataLoader[Any], groups: list[Tensor] | GroupQueue) -> DataLoader[Any]:
    """Return a loader of the same data set and workers whose batches are these groups.

    Args:
        loader: the one that the user gave.
        groups: positions [n] of each group; of a queue, one worker fetches one group ahead.
    """
    queued = isinstance(groups, GroupQueue)
    workers = min(loader.num_workers, 1 if queued else len(groups))
    batches: Any = groups if isinstance(groups, GroupQueue) else [g.tolist() for g in groups]
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=(1 if queued else 2) if workers else None,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        generator=torch.Generator(),  # else each pass draws from the global stream
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device, to which pinned memory is copied while the host goes on."""
    ahead = device.type != "cpu"  # towards the CPU the values could be read before they are there
    x, y, index = (part.to(device, non_blocking=ahead) for part in batch)
    return x, y, index


def regrouped(batches: Iterable[Batch], size: int = GROUP_SIZE) -> Iterator[Batch]:
    """Yield the same images in the same order, in batches of another size.

    Args:
        batches: images [B, ...], labels [B] and indices [B], of any sizes.
        size: images in a group; the last one may have fewer.
    """
    held: list[tuple[Tensor, ...]] = []
    for batch in batches:
        held.append(tuple(part.clone() for part in batch))  # a loader may reuse its buffers
        while sum(len(part[1]) for part in held) >= size:
            x, y, index = (torch.cat(parts) for parts in zip(*held, strict=True))
            yield x[:size], y[:size], index[:size]
            held = [(x[size:], y[size:], index[size:])]
    if sum(len(part[1]) for part in held):
        x, y, index = (torch.cat(parts) for parts in zip(*held, strict=True))
        yield x, y, index


def unpacked(batch: Any, unpack: Unpack | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return images, labels and, if the batch has them, indices.

    Args:
        batch: (x, y) or (x, y, index), tensors or arrays, or what `unpack` makes into it.
        unpack: a function of the batch; None takes it as it is.

    Raises:
        TypeError: the batch is something else.
        ValueError: there is not one label for each image.
    """
    parts = unpack(batch) if unpack else batch
    if not isinstance(parts, list | tuple) or len(parts) not in (2, 3):
        raise TypeError(
            "batches must be (images, labels) or (images, labels, indices), got "
            f"{type(parts).__name__}: give unpack, such as lambda b: (b['image'], b['label'])"
        )
    try:
        x, y, *index = (torch.as_tensor(part) for part in parts)
    except (TypeError, ValueError) as error:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"batches must be of tensors or arrays, got ({kinds})") from error
    if x.dim() < 2:
        raise ValueError(f"images must be a batch [B, …], got shape {list(x.shape)}")
    check_label_type(y, len(x))
    return x, y.long(), index[0].long() if index else None


def with_index(batch: Any, positions: Tensor, unpack: Unpack | None = None) -> Batch:
    """Return images, labels and indices; where a batch has no indices, the positions.

    Args:
        batch: see `unpacked`.
        positions: [B] of its images in the data set.
        unpack: see `unpacked`.

    Raises:
        TypeError: the batch is something else.
        ValueError: it has another number of images, or no label for each.
    """
    x, y, index = unpacked(batch, unpack)
    if len(x) != len(positions):
        raise ValueError(f"{len(positions)} images were fetched, but their batch has {len(x)}")
    return x, y, positions.to(y.device) if index is None else index


def counted(batches: Iterable[Any], unpack: Unpack | None = None) -> Iterator[Batch]:
    """Yield images, labels and indices; where batches have no indices, each image's position."""
    seen = 0
    for batch in batches:
        x, y, index = unpacked(batch, unpack)
        yield x, y, torch.arange(seen, seen + len(x)) if index is None else index
        seen += len(x)


def choose(images: int, number: int | None, seed: int, within: int | None = None) -> Tensor:
    """Return the positions that are evaluated: all, or a random choice of them.

    Args:
        images: in the data set.
        number: how many are evaluated; None is all.
        seed: of the choice.
        within: only positions below this one count; None is all.
    """
    within = images if within is None else within
    if number is None or number >= images:
        return torch.arange(within)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    return order[order < within][:number]
