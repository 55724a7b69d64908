"""Grey images of 28x28 pixels: MNIST, Fashion-MNIST, and 5,000 digits without a download."""

import gzip
import shutil
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_rob.data.base import ImageData, InMemoryImages
from lightning_rob.data.cifar import TorchvisionData


class MNIST(TorchvisionData):
    """Handwritten digits (LeCun et al. 1998): 60,000 images to train, 10,000 to test.

    Args:
        root: folder that contains, or will receive, `MNIST/raw`.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name, location = "MNIST", "MNIST/raw"
    classes = 10
    channels = 1
    size = 28
    mean = (0.1307,)
    std = (0.3081,)


class FashionMNIST(TorchvisionData):
    """Ten kinds of clothes (Xiao et al. 2017): 60,000 images to train, 10,000 to test.

    Where the Debian package `dataset-fashion-mnist` is installed, its files are unpacked into
    `root` instead of downloaded.

    Args:
        root: folder that contains, or will receive, `FashionMNIST/raw`.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name, location = "FashionMNIST", "FashionMNIST/raw"
    packaged: ClassVar[Path] = Path("/usr/share/datasets/fashion-mnist")
    classes = 10
    channels = 1
    size = 28
    mean = (0.2860,)
    std = (0.3530,)

    def prepare_data(self) -> None:
        """Unpack Debian's files if they are installed, else download if asked to.

        Raises:
            FileNotFoundError: the files are missing.
        """
        target = Path(self.root) / self.location
        if self.packaged.exists() and not target.exists():
            unfinished = target.with_name("unfinished")
            unfinished.mkdir(parents=True, exist_ok=True)
            for file in self.packaged.glob("*.gz"):
                with gzip.open(file) as packed, (unfinished / file.stem).open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
            unfinished.rename(target)
        super().prepare_data()


@cache
def _digits() -> Tensor:
    """Read 500 images of each digit: [10, 500, 1, 28, 28] uint8."""
    with np.load(Path(__file__).with_name("mnist_5k.npz")) as file:
        return torch.from_numpy(file["digits"])


class Digits5k(ImageData):
    """5,000 MNIST digits, part of this package: 400 of each digit to train, 100 to test.

    Results on them cannot be compared with results on MNIST.

    Args:
        val_size: training images held out for validation.
        **options: see `ImageData`; the split into training and test images depends on
            `split_seed`.
    """

    classes = 10
    channels = 1
    size = 28
    mean = (0.1307,)
    std = (0.3081,)

    def __init__(self, val_size: int = 500, **options: Any) -> None:
        super().__init__(val_size=val_size, **options)

    def source(self, train: bool) -> InMemoryImages:
        """Return the images, ten different digits in every ten in a row."""
        draws = torch.rand(10, 500, generator=self.split_generator(1))
        chosen = draws.argsort(1)[:, 100:] if train else draws.argsort(1)[:, :100]
        images = _digits()[torch.arange(10), chosen.T]
        return InMemoryImages(images.flatten(0, 1), torch.arange(10).repeat(len(images)))
