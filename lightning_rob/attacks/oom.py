"""Batches that are attacked in parts, because memory does not suffice for the whole."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import restricted_to
from lightning_rob.randomness import Generator, Streams

Work = Callable[[Defense, Tensor, Tensor, Generator], Tensor]


def retry_with_smaller_batches(
    work: Work, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on a batch, and on its halves where that runs out of memory, with a warning.

    The device's memory is meant: what the processor lacks is found by the system, which kills.

    Args:
        work: the defense, images [B, …], labels [B] and their noise -> [B, …].
        defense: one that has adapted to the batch is asked about the images of each part.
        x: [B, …] images.
        y: [B] labels.
        generator: where noise comes from; `Streams` give each image the same one in any part.

    Returns:
        [B, …].
    """
    drawn = generator.counter if isinstance(generator, Streams) else 0
    try:
        return work(defense, x, y, generator)
    except torch.OutOfMemoryError:
        if len(x) < 2:
            raise
    # beyond the handler, whose traceback holds on to what the attempt has allocated
    half = (len(x) + 1) // 2
    warnings.warn(
        f"an attack on {len(x)} images at once ran out of memory and goes on with {half}: save "
        "the attempt by Chunked(images=…) or a smaller eval_batch_size",
        stacklevel=2,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if isinstance(generator, Streams):
        generator.counter = drawn
    return run_in_chunks(partial(retry_with_smaller_batches, work), half, defense, x, y, generator)


def run_in_chunks(
    work: Work, count: int, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on a batch part by part; see `retry_with_smaller_batches`.

    Args:
        work: the defense, images [b, …], labels [b] and their noise -> [b, …].
        count: b, how many images a part has at most.
        defense: one that has adapted to the batch is asked about the images of each part.
        x: [B, …] images.
        y: [B] labels.
        generator: where noise comes from.

    Returns:
        [B, …].
    """
    done, drawn = [], 0
    for first in range(0, len(x), count):
        some = torch.arange(first, min(first + count, len(x)), device=x.device)
        part = generator[some] if isinstance(generator, Streams) else generator
        with restricted_to(defense, some):
            done.append(work(defense, x[some], y[some], part))
        drawn = max(drawn, part.counter) if isinstance(part, Streams) else 0
    if isinstance(generator, Streams):
        generator.counter = drawn
    return torch.cat(done)


def kept_for_gradients(work: Callable[[], object]) -> int:
    """How many bytes autograd keeps when work takes its first gradient; work runs to its end."""
    storages: dict[int, int] = {}
    counting = True

    def keep(value: Tensor) -> Tensor:
        if counting:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return value

    def use(value: Tensor) -> Tensor:
        nonlocal counting
        counting = False
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, use):
        work()
    return sum(storages.values())
