"""Transformed images, computed once."""

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lightning_rob.data.base import IndexedSubset, Sample
from lightning_rob.defenses.transform_ensemble import transformed
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform

CHUNK = 256  # images at a time, so that memory stays flat


class TransformedImages:
    """Images of a subset in memory, transformed on request."""

    def __init__(self, part: IndexedSubset | Sequence[Sample]) -> None:
        rows = [part[i] for i in range(len(part))]
        self.x = torch.stack([x for x, *_ in rows])
        self.y = torch.tensor([int(y) for _, y, _ in rows])
        self.index = torch.tensor([index for *_, index in rows])
        self._positions = torch.full((int(self.index.max()) + 1,), -1)
        self._positions[self.index] = torch.arange(len(rows))

    def positions(self, index: Tensor) -> Tensor:
        """Return the positions [B] of the images with these indices [B]."""
        return self._positions[index.cpu()]

    def transformed(self, transform: Transform, name: str, seed: int) -> Tensor:
        """Return all images [N, C, H, W] transformed; the randomness is keyed by image."""
        chunks = []
        for start in range(0, len(self.x), CHUNK):
            x, index = self.x[start : start + CHUNK], self.index[start : start + CHUNK]
            with torch.no_grad():
                chunks.append(transformed(transform, name, x, Streams.from_index(index, seed)))
        return torch.cat(chunks)

    @cached_property
    def digest(self) -> str:
        """Hash of the images, their labels and indices."""
        digest = hashlib.sha256(f"{self.x.dtype} {list(self.x.shape)}".encode())
        for tensor in (self.x, self.y, self.index):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]
