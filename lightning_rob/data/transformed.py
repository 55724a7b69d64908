"""Images as a transformation leaves them, computed once and kept."""

import hashlib
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from lightning_rob.data.samples import Part
from lightning_rob.defenses.transform_ensemble import transformed
from lightning_rob.files import atomic_save
from lightning_rob.nets.contents import read_file
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform

CHUNK = 256  # images at a time, so that memory stays flat
MAKERS = ("lightning-rob", "torch", "kornia", "scikit-image", "scikit-learn")


class Shown:
    """A part of a data set that lies in memory, to be seen through one transformation or another.

    Args:
        part: the images, not augmented.
        folder: where transformed images are kept for the next run; None keeps none.
    """

    def __init__(self, part: Part, folder: str | None = None) -> None:
        rows = [part[i] for i in range(len(part))]
        self.x = torch.stack([x for x, *_ in rows])
        self.y = torch.tensor([int(y) for _, y, _ in rows])
        self.index = torch.tensor([index for *_, index in rows])
        self.place = torch.full((int(self.index.max()) + 1,), -1)
        self.place[self.index] = torch.arange(len(rows))
        self.folder = folder

    def rows(self, index: Tensor) -> Tensor:
        """Where images with these indices [B] are: [B]."""
        return self.place[index.cpu()]

    def through(
        self, transform: Transform, name: str, seed: int, tell: Callable[[int], None] | None = None
    ) -> Tensor:
        """All images [N, C, H, W] as a transformation leaves them; its chance is keyed by image.

        Args:
            transform: the transformation.
            name: what it is called.
            seed: of its chance.
            tell: called with the number of images after each chunk.
        """
        path = self._path(transform, name, seed)
        if path and path.exists():
            kept: Tensor = read_file(path)
            return kept
        chunks = []
        for start in range(0, len(self.x), CHUNK):
            x, index = self.x[start : start + CHUNK], self.index[start : start + CHUNK]
            with torch.no_grad():
                chunks.append(transformed(transform, name, x, Streams.from_index(index, seed)))
            if tell:
                tell(len(x))
        found = torch.cat(chunks)
        if path:
            atomic_save(found, path)
        return found

    def _path(self, transform: Transform, name: str, seed: int) -> Path | None:
        """A file for these images, this transformation and this chance."""
        if self.folder is None:
            return None
        made_by = [version(package) for package in MAKERS]
        told = f"{self.digest} {transform!r} {seed} {made_by}"
        return Path(self.folder) / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.pt"

    @cached_property
    def digest(self) -> str:
        """What tells these images, their labels and indices from others."""
        found = hashlib.sha256(f"{self.x.dtype} {list(self.x.shape)}".encode())
        for tensor in (self.x, self.y, self.index):
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()[:16]
