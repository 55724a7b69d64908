"""A data set as torchvision downloads, verifies and reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_rob.data.samples import Pixels


@dataclass(frozen=True)
class Archive:
    """The files of one of torchvision's data sets.

    Args:
        name: its class in `torchvision.datasets`.
        holds: a file or folder under `root` that is there once the data set is.
        root: where the files are or go.
        download: fetch them if they are missing.
    """

    name: str
    holds: str
    root: str
    download: bool

    def prepare(self) -> None:
        """Download if asked to.

        Raises:
            FileNotFoundError: the files are not there.
        """
        if self.download:
            for train in (True, False):
                self._open(train, download=True)
        elif not (Path(self.root) / self.holds).exists():
            raise self._missing("not in")

    def load(self, train: bool) -> Pixels:
        """All images of the training or the test set.

        Raises:
            FileNotFoundError: files are missing or fail torchvision's checksum.
        """
        try:
            opened = self._open(train, download=False)
        except (RuntimeError, FileNotFoundError) as error:
            raise self._missing("missing, incomplete or corrupt in") from error
        images = torch.as_tensor(opened.data)
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2).contiguous()
        return Pixels(images, opened.labels if self.name == "SVHN" else opened.targets)

    def _open(self, train: bool, download: bool) -> Any:
        import torchvision.datasets  # here, for a data set without it should not need it

        if self.name == "SVHN":
            split = "train" if train else "test"
            return torchvision.datasets.SVHN(self.root, split=split, download=download)
        return getattr(torchvision.datasets, self.name)(self.root, train=train, download=download)

    def _missing(self, how: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self.name} is {how} {Path(self.root).absolute() / self.holds}:"
            " pass --data.download=true, or --data.root=… if it is elsewhere"
        )
