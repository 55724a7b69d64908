"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009)."""

from typing import Any

from lightning_rob.data.archive import Archive
from lightning_rob.data.image_data import ImageData
from lightning_rob.data.samples import Augment, Pixels


def shift_and_flip() -> list[Augment]:
    """The usual augmentation of 32x32 images: a crop after 4 pixels of padding, and a flip."""
    from torchvision.transforms import v2

    return [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]


class CIFAR10(ImageData):
    """Ten kinds of things: 50,000 images to train, 10,000 to test.

    Args:
        root: folder that has, or is to have, `cifar-10-batches-py`.
        download: fetch the files if they are missing.
        **options: see `ImageData`; training images are shifted and flipped unless `augment` is
            given.
    """

    classes = 10
    channels = 3
    size = 32
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2471, 0.2435, 0.2616)

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.archive = Archive("CIFAR10", "cifar-10-batches-py", root, download)

    def prepare_data(self) -> None:
        """Download, or see that there is no need to."""
        self.archive.prepare()

    def source(self, train: bool) -> Pixels:
        """The whole training or test set."""
        return self.archive.load(train)

    def default_augment(self) -> list[Augment]:
        """Shift and flip."""
        return shift_and_flip()


class CIFAR100(ImageData):
    """A hundred kinds of things: 50,000 images to train, 10,000 to test.

    Args:
        root: folder that has, or is to have, `cifar-100-python`.
        download: fetch the files if they are missing.
        **options: see `ImageData`; training images are shifted, flipped and rotated unless
            `augment` is given.
    """

    classes = 100
    channels = 3
    size = 32
    mean = (0.50708, 0.48655, 0.44092)
    std = (0.26733, 0.25644, 0.27615)

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.archive = Archive("CIFAR100", "cifar-100-python", root, download)

    def prepare_data(self) -> None:
        """Download, or see that there is no need to."""
        self.archive.prepare()

    def source(self, train: bool) -> Pixels:
        """The whole training or test set."""
        return self.archive.load(train)

    def default_augment(self) -> list[Augment]:
        """Shift, flip and rotate by up to 15 degrees, as the ARC authors' code does."""
        from torchvision.transforms import v2

        return [*shift_and_flip(), v2.RandomRotation(15)]
