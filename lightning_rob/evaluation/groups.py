"""Canonical groups: the same images are attacked together whatever the batches and the ranks.

The rounding of a matrix product depends on its shape, so an image alone and the same image in a
batch may get other logits in the last bit, and another adversarial image. An evaluation therefore
cuts the data set into groups by position and deals groups, not images, to the processes.
"""

from collections.abc import Iterable, Iterator
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


def canonical_groups(
    positions: Tensor, size: int = GROUP_SIZE, rank: int = 0, world_size: int = 1
) -> list[Tensor]:
    """Return this process's groups of images.

    Args:
        positions: [N] places in the data set, in any order.
        size: images in a group; the last one may have fewer.
        rank: number of this process.
        world_size: how many processes share the groups.

    Returns:
        Every `world_size`-th group of the sorted positions; a process may have none.

    Raises:
        ValueError: groups without images.
    """
    if size < 1:
        raise ValueError(f"group_size must be at least 1, got {size}")
    groups = torch.split(positions.sort().values, size) if len(positions) else ()
    return list(groups[rank::world_size])


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


def group_loader(loader: DataLoader[Any], groups: list[Tensor]) -> DataLoader[Any]:
    """Return a loader of the same data set and workers whose batches are these groups.

    Args:
        loader: the one that the user gave.
        groups: positions [n] of each group.
    """
    workers = min(loader.num_workers, len(groups))
    return DataLoader(
        loader.dataset,
        batch_sampler=[group.tolist() for group in groups],
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        generator=torch.Generator(),  # else each pass draws from the global stream
    )


def regrouped(
    batches: Iterable[tuple[Tensor, Tensor, Tensor]], size: int = GROUP_SIZE
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
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


def with_index(batch: Any, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch (x, y) or (x, y, index) with its indices; without any, the positions.

    Args:
        batch: tensors or arrays.
        positions: [B] of its images; None counts from 0.

    Raises:
        TypeError: the batch is something else.
        ValueError: it has another number of images, or no label for each.
    """
    if not isinstance(batch, list | tuple) or len(batch) not in (2, 3):
        raise TypeError(
            "batches must be (images, labels) or (images, labels, indices), got "
            f"{type(batch).__name__}: convert them by the loader's collate_fn"
        )
    try:
        x, y, *rest = (torch.as_tensor(part) for part in batch)
    except (TypeError, ValueError) as error:
        kinds = ", ".join(type(part).__name__ for part in batch)
        raise TypeError(f"batches must be of tensors or arrays, got ({kinds})") from error
    if positions is None:
        positions = torch.arange(len(x) if x.dim() else 0)
    if x.dim() < 2 or len(x) != len(positions):
        raise ValueError(f"expected {len(positions)} images, got a batch {list(x.shape)}")
    check_label_type(y, len(x))
    return x, y.long(), (rest[0] if rest else positions.to(y.device)).long()


def counted(batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches with indices; without any, each image's position."""
    seen = 0
    for batch in batches:
        x, y, index = with_index(batch)
        if len(batch) == 2:
            index = index + seen
        seen += len(x)
        yield x, y, index


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
