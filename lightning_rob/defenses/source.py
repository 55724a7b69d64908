"""Labelled images that a defense learns from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

SourceData = tuple[Tensor, Tensor] | Dataset[Any]
Augment = Callable[[Tensor], Any]


class Source:
    """Labelled images, taken by position.

    Args:
        data: (x [N, C, H, W] in [0, 1], y [N]), or a data set of items (x, y, …).

    Raises:
        TypeError: neither.
        ValueError: no images, images and labels that differ in number, images beyond [0, 1].
    """

    def __init__(self, data: "SourceData | Source") -> None:
        self.data: Any = data.data if isinstance(data, Source) else data
        if isinstance(self.data, list) and all(isinstance(part, Tensor) for part in self.data):
            self.data = tuple(self.data)
        pair = isinstance(self.data, tuple)
        if isinstance(self.data, Tensor | str) or (
            pair and not (len(self.data) == 2 and all(isinstance(x, Tensor) for x in self.data))
        ):
            raise TypeError(
                "source must be two tensors (x, y) or a data set of items (x, y, …), got "
                f"{type(data).__name__}"
            )
        if pair and len(self.data[0]) != len(self.data[1]):
            counts = [len(part) for part in self.data]
            raise ValueError(f"source must have a label for each image, got {counts}")
        if not len(self):
            raise ValueError("source must have at least one image, got none")
        if isinstance(self.data, tuple):
            check_range(self.data[0])

    def __len__(self) -> int:
        return len(self.data[0] if isinstance(self.data, tuple) else self.data)

    def take(self, index: Tensor, augment: Sequence[Augment] = ()) -> tuple[Tensor, Tensor]:
        """The images at these positions.

        Args:
            index: [B] positions.
            augment: what is done to each image [C, H, W], drawing from torch's global stream.

        Returns:
            [B, C, H, W] and [B].
        """
        if isinstance(self.data, tuple):
            x, y = (part[index.to(part.device)] for part in self.data)
        else:
            x, y = self._items(index.tolist())
            check_range(x)
        for step in augment:
            x = torch.stack([step(image) for image in x])
        return x, y

    def _items(self, places: list[int]) -> tuple[Tensor, Tensor]:
        many = getattr(self.data, "__getitems__", None)
        items = many(places) if many else [self.data[place] for place in places]
        return torch.stack([item[0] for item in items]), torch.as_tensor([i[1] for i in items])


def check_range(x: Tensor) -> None:
    """Raise ValueError unless images [B, C, H, W] lie in [0, 1]."""
    low, high = float(x.min()), float(x.max())
    if not (low >= -1e-4 and high <= 1 + 1e-4):
        raise ValueError(
            f"source must have images in [0, 1], got values in [{low:.4g}, {high:.4g}]"
        )
