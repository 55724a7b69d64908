"""Samples (x, y, index): pixels in memory, and a part of a source with its augmentation."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_rob.randomness import Streams

Augment = Callable[[Tensor], Any]  # to a Tensor; jsonargparse takes Tensor to mean a factory
Sample = tuple[Tensor, int, int]


class Source(Protocol):
    """All images of a data set with their labels: `source[index]` is ([C,H,W] in [0,1], y)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Pixels:
    """A source that lies in memory.

    Args:
        images: [N,C,H,W] uint8.
        labels: [N] integers.
    """

    def __init__(self, images: Tensor, labels: Any) -> None:
        self.images = images
        self.labels = torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


class Part(Dataset[Sample]):
    """Some of a source's images, each with its index there.

    An image is asked for by `epoch * len(part) + position` (a plain position is epoch 0), and what
    is done to it is a function of (seed, epoch, index): the same in any worker, any batch and after
    any resumption. torch's global stream is only borrowed.

    Args:
        source: the images.
        indices: [N] which of them.
        steps: what is done to each, drawing from torch's global stream.
        seed: names the draws.
    """

    def __init__(
        self, source: Source, indices: Tensor, steps: Sequence[Augment] = (), seed: int = 0
    ) -> None:
        self.source = source
        self.indices = indices
        self.steps = tuple(steps)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, code: int) -> Sample:
        return self.__getitems__([code])[0]

    def __getitems__(self, codes: list[int]) -> list[Sample]:
        """The samples of a batch, as a `DataLoader` asks for them."""
        place = torch.tensor(codes)
        index = self.indices[place % len(self)]
        if not self.steps:
            return [self._sample(i) for i in index.tolist()]
        moment = place // len(self) * len(self.source) + index
        keys = Streams.from_index(moment, self.seed).keys
        with torch.random.fork_rng(devices=[]):
            return [
                self._sample(i, key) for i, key in zip(index.tolist(), keys.tolist(), strict=True)
            ]

    def _sample(self, index: int, key: int = 0) -> Sample:
        x, y = self.source[index]
        if self.steps:
            torch.default_generator.manual_seed(key)  # torch.manual_seed would seed the GPU as well
        for step in self.steps:
            x = step(x)
        return x, y, index
