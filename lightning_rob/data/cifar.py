"""Data sets of 32x32 colour images that torchvision downloads and reads: CIFAR and SVHN."""

from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_rob.data.base import Augment, ImageData, InMemoryImages


class TorchvisionData(ImageData):
    """Data set that torchvision downloads, verifies and reads.

    Args:
        root: folder of the data sets' files.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name: ClassVar[str]  # its class in `torchvision.datasets`
    location: ClassVar[str]  # file or folder under `root` that a complete data set has

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Download the files if asked to.

        Raises:
            FileNotFoundError: the files are missing.
        """
        if self.download:
            for train in (True, False):
                self._open(train, download=True)
        elif not (Path(self.root) / self.location).exists():
            raise self._missing("not in")

    def source(self, train: bool) -> InMemoryImages:
        """Return all images of the training or the test set.

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
        labels = opened.labels if self.torchvision_name == "SVHN" else opened.targets
        return InMemoryImages(images, labels)

    def _open(self, train: bool, download: bool) -> Any:
        from torchvision import datasets  # here: the embedded data sets work without torchvision

        kind = getattr(datasets, self.torchvision_name)
        if self.torchvision_name == "SVHN":
            return kind(self.root, split="train" if train else "test", download=download)
        return kind(self.root, train=train, download=download)

    def _missing(self, how: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self.torchvision_name} is {how} {Path(self.root).absolute() / self.location}:"
            " pass --data.download=true, or --data.root=… if it is elsewhere"
        )


def shift_and_flip() -> list[Augment]:
    """Return the usual augmentation of 32x32 images: crop after padding by 4 pixels, and flip."""
    from torchvision.transforms import v2

    return [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]


class CIFAR10(TorchvisionData):
    """Ten kinds of objects (Krizhevsky 2009): 50,000 images to train, 10,000 to test.

    Training images are shifted and flipped unless `augment` is given.

    Args:
        root: folder that contains, or will receive, `cifar-10-batches-py`.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name, location = "CIFAR10", "cifar-10-batches-py"
    classes = 10
    channels = 3
    size = 32
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2471, 0.2435, 0.2616)

    def default_augment(self) -> list[Augment]:
        """Shift and flip."""
        return shift_and_flip()


class CIFAR100(TorchvisionData):
    """A hundred kinds of objects (Krizhevsky 2009): 50,000 images to train, 10,000 to test.

    Training images are shifted, flipped and rotated unless `augment` is given.

    Args:
        root: folder that contains, or will receive, `cifar-100-python`.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name, location = "CIFAR100", "cifar-100-python"
    classes = 100
    channels = 3
    size = 32
    mean = (0.50708, 0.48655, 0.44092)
    std = (0.26733, 0.25644, 0.27615)

    def default_augment(self) -> list[Augment]:
        """Shift, flip and rotate by up to 15 degrees, as the ARC authors' code does."""
        from torchvision.transforms import v2

        return [*shift_and_flip(), v2.RandomRotation(15)]


class SVHN(TorchvisionData):
    """Single digits of house numbers (Netzer et al. 2011): 73,257 images to train, 26,032 to test.

    Training images are shifted and flipped unless `augment` is given.

    Args:
        root: folder that contains, or will receive, `train_32x32.mat` and `test_32x32.mat`.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name, location = "SVHN", "train_32x32.mat"
    classes = 10
    channels = 3
    size = 32
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def default_augment(self) -> list[Augment]:
        """Shift and flip, as the ARC authors' code does even to digits."""
        return shift_and_flip()
