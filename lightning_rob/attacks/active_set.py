"""The images of a batch that an attack still works on; the others have left the batch."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from lightning_rob.randomness import Generator, Streams


@dataclass
class ActiveBatch:
    """The images still attacked, with one row per image in every tensor."""

    index: Tensor  # [b] the images' positions in the whole batch
    x: Tensor  # [b, C, H, W] the clean images
    y: Tensor  # [b] their labels
    generator: Generator  # the source of their randomness; of `Streams` each image keeps its own

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: Tensor) -> Self:
        """Return some of the images, given as a mask [b] or as indices, with all their state."""
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]  # once: a GPU waits at each use of a mask as an index
            if len(rows) == len(self):  # nothing to copy but the streams, which have a state
                return replace(self, generator=rows_of(self.generator, rows))
        per_image: dict[str, Any] = {
            name: value[rows]
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Streams)
        }
        return replace(self, **per_image)

    def rows_of(self, values: Tensor) -> Tensor:
        """Return the active images' rows of values [B, …], which are not copied while all are."""
        return values if len(values) == len(self) else values[self.index]


def rows_of(generator: Generator, rows: Tensor) -> Generator:
    """Return the source of noise of some images: of `Streams` theirs."""
    return generator[rows] if isinstance(generator, Streams) else generator


def positions(x: Tensor) -> Tensor:
    """Return the positions [B] of all images of a batch."""
    return torch.arange(len(x), device=x.device)


def derived(generator: Generator, key: int) -> Generator:
    """Return other streams for a numbered part of an attack; a `torch.Generator` as it is."""
    # An image's noise depends on the part alone, not on how much was drawn for images that left.
    return generator.fold_in(key) if isinstance(generator, Streams) else generator
