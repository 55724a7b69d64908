"""Transformed images, computed once and cached."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from lightning_rob.data.base import IndexedSubset, Sample
from lightning_rob.defenses.transform_ensemble import transformed
from lightning_rob.nets.weights import read_file
from lightning_rob.randomness import Streams
from lightning_rob.runtime.files import atomic_save
from lightning_rob.transforms import Transform

CHUNK = 256  # images at a time, so that memory stays flat
MAKERS = ("lightning-rob", "torch", "kornia", "scikit-image", "scikit-learn")


class TransformedCache:
    """Images of a subset in memory, transformed on request; a folder keeps them for later runs."""

    def __init__(self, part: IndexedSubset | Sequence[Sample], folder: str | None = None) -> None:
        rows = [part[i] for i in range(len(part))]
        self.x = torch.stack([x for x, *_ in rows])
        self.y = torch.tensor([int(y) for _, y, _ in rows])
        self.index = torch.tensor([index for *_, index in rows])
        self._positions = torch.full((int(self.index.max()) + 1,), -1)
        self._positions[self.index] = torch.arange(len(rows))
        self.folder = folder

    def positions(self, index: Tensor) -> Tensor:
        """Return the positions [B] of the images with these indices [B]."""
        return self._positions[index.cpu()]

    def transformed(
        self,
        transform: Transform,
        name: str,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return all images [N, C, H, W] transformed; the randomness is keyed by image.

        `progress` is called with the number of images after each chunk.
        """
        path = self._path(transform, name, seed)
        if path and path.exists():
            cached: Tensor = read_file(path)
            return cached
        chunks = []
        for start in range(0, len(self.x), CHUNK):
            x, index = self.x[start : start + CHUNK], self.index[start : start + CHUNK]
            with torch.no_grad():
                chunks.append(transformed(transform, name, x, Streams.from_index(index, seed)))
            if progress:
                progress(len(x))
        images = torch.cat(chunks)
        if path:
            atomic_save(images, path)
        return images

    def _path(self, transform: Transform, name: str, seed: int) -> Path | None:
        if self.folder is None:
            return None
        # Another version of a library may transform otherwise: its images get another name.
        made_by = [version(package) for package in MAKERS]
        identity = f"{self.digest} {transform!r} {seed} {made_by}"
        return Path(self.folder) / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.pt"

    @cached_property
    def digest(self) -> str:
        """Hash of the images, their labels and indices."""
        digest = hashlib.sha256(f"{self.x.dtype} {list(self.x.shape)}".encode())
        for tensor in (self.x, self.y, self.index):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]
