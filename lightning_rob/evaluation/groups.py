"""Canonical groups: the same images are attacked together whatever the batches and the ranks.

The rounding of a matrix product depends on its shape, so an image alone and the same image in a
batch may get other logits in the last bit, and another adversarial image. An evaluation therefore
cuts the data set into groups by position; processes share groups, not images.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
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
from lightning_rob.randomness import derive_seed, own_streams
from lightning_rob.runtime.errors import at_least

GROUP_SIZE = 128
Batch = tuple[Tensor, Tensor, Tensor]
Unpack = Callable[[Any], Any]


def canonical_groups(positions: Tensor, size: int = GROUP_SIZE) -> list[Tensor]:
    """Return positions [N], in any order, sorted and cut into groups that are attacked together."""
    at_least(1, group_size=size)
    return list(torch.split(positions.sort().values, size)) if len(positions) else []


def serves_once(loader: Any, world_size: int = 1) -> bool:
    """Return whether a loader, as each process has it, serves all images once, in any order."""
    if not _has_positions(loader) or loader.batch_size is None:  # a batch sampler of the user's
        return False
    sampler, dataset = loader.sampler, loader.dataset
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas == world_size:
        if sampler.dataset is dataset:
            return True
        sampler = _undistributed(sampler)
    if type(sampler) is RandomSampler and (sampler.replacement or len(sampler) < len(dataset)):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is dataset


def _has_positions(loader: Any) -> bool:
    """Whether images can be fetched by position: not from a stream, nor from stored batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # A loader with an `__iter__` of its own may serve anything.
    return type(loader).__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None


def _undistributed(sampler: Any) -> Any:
    """Return the loader's own sampler, which Lightning puts behind a distributed one."""
    # Its copies on several processes may shuffle differently, so that their shares overlap.
    inside = getattr(sampler, "dataset", None) if isinstance(sampler, DistributedSampler) else None
    return getattr(inside, "_sampler", sampler)


def served_positions(loader: Any, world_size: int = 1) -> list[int] | None:
    """Return the sorted positions of the images that a loader serves; None if unknown."""
    if not _has_positions(loader):
        return None
    if serves_once(loader, world_size):
        return list(range(len(loader.dataset)))
    batches = type(loader.batch_sampler) is not BatchSampler
    sampler = _undistributed(loader.batch_sampler if batches else loader.batch_sampler.sampler)
    if not hasattr(sampler, "__len__"):
        return None
    # A training loader may share the generators.
    owners = (sampler, getattr(sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    before = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        with own_streams(0):
            # A sampler may be endless: its length says how much it serves.
            found = list(islice(sampler, len(sampler)))
    finally:
        for generator, state in before:
            generator.set_state(state)
    try:
        return sorted({place.__index__() for place in (chain(*found) if batches else found)})
    except (AttributeError, TypeError):
        return None


def is_repeated(loader: Any, number: int) -> bool:
    """Return whether a process's batch of this number was served before."""
    # Lightning's sampler repeats stored batches so that all processes have equally many.
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or loader.batch_sampler is not None:
        return False
    stored: Any = sampler.dataset
    return bool(number * sampler.num_replicas + sampler.rank >= len(stored))


def fetch(loader: Any, positions: Tensor | Sequence[int]) -> Any:
    """Return the images at these positions of a loader's data set, as a batch of the loader."""
    places = torch.as_tensor(positions).tolist()
    many = getattr(loader.dataset, "__getitems__", None)
    # Draws of the data set from the global streams are a function of the positions.
    with own_streams(derive_seed(*places)):
        return loader.collate_fn(many(places) if many else [loader.dataset[i] for i in places])


def group_loader(loader: DataLoader[Any], groups: list[Tensor]) -> Iterator[Any]:
    """Yield groups of positions of a loader's data set, fetched by its workers."""
    workers = min(loader.num_workers, len(groups))
    if not workers:
        yield from (fetch(loader, group) for group in groups)
        return
    yield from DataLoader(
        loader.dataset,
        batch_sampler=[group.tolist() for group in groups],
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # else each pass draws from the global stream
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device, to which pinned memory is copied while the host goes on."""
    ahead = device.type != "cpu"  # towards the CPU the values could be read before they are there
    x, y, index = (part.to(device, non_blocking=ahead) for part in batch)
    return x, y, index


def regrouped(batches: Iterable[Batch], size: int = GROUP_SIZE) -> Iterator[Batch]:
    """Yield the same images in the same order, in batches of another size."""
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
    """Return images, labels and, if the batch (x, y) or (x, y, index) has them, indices."""
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
    """Return images, labels and indices; where a batch has no indices, the positions [B]."""
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
    """Return the positions that are evaluated: all, or a random choice of them."""
    within = images if within is None else within
    if number is None or number >= images:
        return torch.arange(within)
    # Drawn of all images, so that a limit below does not change the choice.
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    return order[order < within][:number]
