"""Work on batches in parts, for instance because a batch does not fit into memory."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks.active_set import positions, rows_of
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.randomness import Generator, Streams

# Maps a defense, images [b, …], their labels [b] and a source of noise to a tensor [b, …].
Work = Callable[[Defense, Tensor, Tensor, Generator], Tensor]


def run_in_chunks(
    work: Work, size: int, defense: Defense, x: Tensor, y: Tensor, generator: Generator
) -> Tensor:
    """Work on at most `size` images at a time; see `run_in_parts`."""
    return run_in_parts(work, torch.split(positions(x), size), defense, x, y, generator)


def run_in_parts(
    work: Work,
    parts: Sequence[Tensor],
    defense: Defense,
    x: Tensor,
    y: Tensor,
    generator: Generator,
) -> Tensor:
    """Work on a batch part by part; the parts' positions [b] together have each image once."""
    done, counter = [], 0
    for rows in parts:
        noise = rows_of(generator, rows)  # of `Streams` an image has the same noise in any part
        with restricted_to(defense, rows):  # one that has adapted sees the images of this part
            done.append(work(defense, x[rows], y[rows], noise))
        counter = max(counter, noise.counter) if isinstance(noise, Streams) else 0
    if isinstance(generator, Streams):
        generator.counter = counter  # as far as an attack on the whole batch would have drawn
    found, order = torch.cat(done), torch.cat(list(parts))
    return torch.empty_like(found).index_copy_(0, order, found)


def restoring(generator: Generator) -> Callable[[], object]:
    """Return a function that sets a source of noise back to its current state."""
    if isinstance(generator, Streams):
        return partial(setattr, generator, "counter", generator.counter)
    if generator is None:
        return lambda: None
    return partial(generator.set_state, generator.get_state())
