"""Batches that are attacked in chunks, such as those that do not fit into memory as a whole."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.randomness import Generator, Streams

Work = Callable[[Defense, Tensor, Tensor, Generator], Tensor]


def retry_with_smaller_batches(
    work: Work, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on a batch; where that runs out of memory, warn and work on its halves.

    This covers the accelerator's memory. A process that exhausts the host's memory is killed.

    Args:
        work: function of the defense, images [B, …], labels [B] and a generator -> [B, …].
        defense: where it has adapted to the batch, it is evaluated on the images of each chunk.
        x: [B, …] images.
        y: [B] labels.
        generator: the source of randomness; `Streams` give an image the same noise in any chunk.

    Returns:
        [B, …].

    Raises:
        torch.OutOfMemoryError: a single image does not fit.
    """
    counter = generator.counter if isinstance(generator, Streams) else 0
    try:
        return work(defense, x, y, generator)
    except torch.OutOfMemoryError:
        if len(x) < 2:
            raise
    # Outside the handler, whose traceback keeps the tensors of the failed attempt alive.
    if isinstance(generator, Streams):
        generator.counter = counter  # the failed attempt has drawn from it
    return run_in_halves(work, defense, x, y, generator)


def run_in_halves(
    work: Work, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Warn that a batch of two images or more did not fit, and work on its halves.

    See `retry_with_smaller_batches`, which halves a half again where that does not fit either.
    """
    half = (len(x) + 1) // 2
    warnings.warn(
        f"an attack on {len(x)} images at once ran out of memory and goes on with {half}: save "
        "the attempt by Chunked(images=…) or a smaller eval_batch_size",
        stacklevel=2,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run_in_chunks(partial(retry_with_smaller_batches, work), half, defense, x, y, generator)


def run_in_chunks(
    work: Work, size: int, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on a batch chunk by chunk; see `retry_with_smaller_batches`.

    Args:
        work: function of the defense, images [b, …], labels [b] and a generator -> [b, …].
        size: b, the largest number of images in a chunk.
        defense: where it has adapted to the batch, it is evaluated on the images of each chunk.
        x: [B, …] images.
        y: [B] labels.
        generator: the source of randomness.

    Returns:
        [B, …].
    """
    done, counter = [], 0
    for first in range(0, len(x), size):
        rows = torch.arange(first, min(first + size, len(x)), device=x.device)
        noise = generator[rows] if isinstance(generator, Streams) else generator
        with restricted_to(defense, rows):
            done.append(work(defense, x[rows], y[rows], noise))
        counter = max(counter, noise.counter) if isinstance(noise, Streams) else 0
    if isinstance(generator, Streams):
        generator.counter = counter  # as far as an attack on the whole batch would have drawn
    return torch.cat(done)


def kept_for_gradients(work: Callable[[], object]) -> int:
    """Run work to its end and return the bytes that autograd keeps for its first gradient."""
    storages: dict[int, int] = {}
    counting = True

    def pack(value: Tensor) -> Tensor:
        if counting:
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return value

    def unpack(value: Tensor) -> Tensor:
        nonlocal counting
        counting = False  # the first backward pass has begun
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        work()
    return sum(storages.values())
