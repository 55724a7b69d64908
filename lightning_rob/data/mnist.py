"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017)."""

from typing import Any

from lightning_rob.data.archive import Archive
from lightning_rob.data.image_data import ImageData
from lightning_rob.data.samples import Pixels


class MNIST(ImageData):
    """Handwritten digits: 60,000 to train, 10,000 to test.

    Args:
        root: folder that has, or is to have, `MNIST/raw`.
        download: fetch the files if they are missing.
        **options: see `ImageData`.
    """

    classes = 10
    channels = 1
    size = 28
    mean = (0.1307,)
    std = (0.3081,)

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.archive = Archive("MNIST", "MNIST/raw", root, download)

    def prepare_data(self) -> None:
        """Download, or see that there is no need to."""
        self.archive.prepare()

    def source(self, train: bool) -> Pixels:
        """The whole training or test set."""
        return self.archive.load(train)


class FashionMNIST(ImageData):
    """Ten kinds of clothes: 60,000 images to train, 10,000 to test.

    Args:
        root: folder that has, or is to have, `FashionMNIST/raw`.
        download: fetch the files if they are missing.
        **options: see `ImageData`.
    """

    classes = 10
    channels = 1
    size = 28
    mean = (0.2860,)
    std = (0.3530,)

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.archive = Archive("FashionMNIST", "FashionMNIST/raw", root, download)

    def prepare_data(self) -> None:
        """Download, or see that there is no need to."""
        self.archive.prepare()

    def source(self, train: bool) -> Pixels:
        """The whole training or test set."""
        return self.archive.load(train)
