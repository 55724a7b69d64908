"""SVHN (Netzer et al. 2011)."""

from typing import Any

from lightning_rob.data.archive import Archive
from lightning_rob.data.cifar import shift_and_flip
from lightning_rob.data.image_data import ImageData
from lightning_rob.data.samples import Augment, Pixels


class SVHN(ImageData):
    """House numbers, digit by digit: 73,257 images to train, 26,032 to test.

    Args:
        root: folder that has, or is to have, `train_32x32.mat` and `test_32x32.mat`.
        download: fetch the files if they are missing.
        **options: see `ImageData`; training images are shifted and flipped unless `augment` is
            given.
    """

    classes = 10
    channels = 3
    size = 32
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.archive = Archive("SVHN", "train_32x32.mat", root, download)

    def prepare_data(self) -> None:
        """Download, or see that there is no need to."""
        self.archive.prepare()

    def source(self, train: bool) -> Pixels:
        """The whole training or test set."""
        return self.archive.load(train)

    def default_augment(self) -> list[Augment]:
        """Shift and flip, as the ARC authors' code does even to digits."""
        return shift_and_flip()
