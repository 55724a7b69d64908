"""Data sets that torchvision downloads and reads: MNIST, Fashion-MNIST, CIFAR, SVHN and GTSRB."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from lightning_rob.data.base import Augment, ImageData, InMemoryImages
from lightning_rob.runtime.errors import at_least


class TorchvisionData(ImageData):
    """Data set that torchvision downloads, verifies and reads.

    Args:
        root: folder that contains, or will receive, the data set.
        download: download the files if they are missing.
        **options: see `ImageData`.
    """

    torchvision_name: ClassVar[str]  # its class in `torchvision.datasets`
    by_split: ClassVar[bool] = False  # torchvision takes a split instead of train=True or False

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        for train in (True, False) if self.download else ():
            self.open(train, download=True)

    def source(self, train: bool) -> InMemoryImages:
        opened = self.open(train)
        images = torch.as_tensor(opened.data)
        if images.ndim == 3:  # grey
            images = images[:, None]
        elif images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2).contiguous()
        return InMemoryImages(images, getattr(opened, "labels" if self.by_split else "targets"))

    def open(self, train: bool, download: bool = False) -> Any:
        """Return torchvision's training or test set."""
        from torchvision import datasets  # here: the embedded data sets work without torchvision

        split = {"split": "train" if train else "test"} if self.by_split else {"train": train}
        try:
            return getattr(datasets, self.torchvision_name)(self.root, download=download, **split)
        except (RuntimeError, FileNotFoundError) as error:
            if download:
                raise
            raise FileNotFoundError(
                f"{self.torchvision_name} is missing, incomplete or corrupt in "
                f"{Path(self.root).absolute()}: pass --data.download=true, or --data.root=… if it "
                "is elsewhere"
            ) from error


class MNIST(TorchvisionData):
    """Handwritten digits (LeCun et al. 1998): 60,000 images to train, 10,000 to test."""

    torchvision_name = "MNIST"
    classes, channels, size = 10, 1, 28
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(TorchvisionData):
    """Ten kinds of clothes (Xiao et al. 2017): 60,000 images to train, 10,000 to test."""

    torchvision_name = "FashionMNIST"
    classes, channels, size = 10, 1, 28
    mean, std = (0.2860,), (0.3530,)


def shift_and_flip() -> list[Augment]:
    """Return the usual augmentation of 32x32 images: crop after padding by 4 pixels, and flip."""
    from torchvision.transforms import v2

    return [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]


class CIFAR10(TorchvisionData):
    """Ten kinds of objects (Krizhevsky 2009): 50,000 images to train, 10,000 to test.

    Training images are shifted and flipped unless `augment` is given.
    """

    torchvision_name = "CIFAR10"
    classes, channels, size = 10, 3, 32
    mean, std = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)

    def default_augment(self) -> list[Augment]:
        return shift_and_flip()


class CIFAR100(TorchvisionData):
    """A hundred kinds of objects (Krizhevsky 2009): 50,000 images to train, 10,000 to test.

    Training images are shifted, flipped and rotated unless `augment` is given.
    """

    torchvision_name = "CIFAR100"
    classes, channels, size = 100, 3, 32
    mean, std = (0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)

    def default_augment(self) -> list[Augment]:
        from torchvision.transforms import v2

        return [*shift_and_flip(), v2.RandomRotation(15)]  # as the ARC authors' code


class SVHN(TorchvisionData):
    """Single digits of house numbers (Netzer et al. 2011): 73,257 images to train, 26,032 to test.

    Training images are shifted and flipped unless `augment` is given.
    """

    torchvision_name, by_split = "SVHN", True
    classes, channels, size = 10, 3, 32
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def default_augment(self) -> list[Augment]:
        return shift_and_flip()  # as the ARC authors' code does even to digits


class GTSRB(TorchvisionData):
    """German traffic signs at 32x32 (Stallkamp et al. 2012), by default of the first ten classes.

    Training images are those of the 2011 competition, as torchvision downloads them: fewer than in
    other copies. The data set has 30 photographs of each sign in a row, so that validation images,
    drawn at random, resemble some of the training images. The ten classes have 4,800 test images.

    The histogram of each channel of an image is equalised. Training images are rotated by up to 15
    degrees, shifted by up to 2.5 pixels and seen at an angle, unless `augment` is given.

    Args:
        classes: K, the signs of classes 0 … K - 1, at most 43; URejectron's experiments have 10.
        **options: see `TorchvisionData`.
    """

    torchvision_name, by_split = "GTSRB", True
    signs: ClassVar[int] = 43  # classes of the data set
    channels, size = 3, 32
    mean = (0.5, 0.5, 0.5)  # of a flat histogram: its standard deviation is 1 / sqrt(12)
    std = (0.29, 0.29, 0.29)

    def __init__(self, classes: int = 10, **options: Any) -> None:
        super().__init__(**options)
        at_least(2, classes=classes)
        if classes > self.signs:
            raise ValueError(f"classes must be at most {self.signs}, got {classes}")
        self.classes = classes

    def source(self, train: bool) -> InMemoryImages:
        from torchvision.transforms.v2 import functional

        samples = self.open(train)._samples  # not public, but else every image would be read
        files = [(path, label) for path, label in samples if label < self.classes]
        images = []
        for path, _ in files:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR)
            images.append(functional.equalize(functional.pil_to_tensor(small)))
        return InMemoryImages(torch.stack(images), [label for _, label in files])

    def test_order(self, count: int) -> Tensor:
        # Shuffled, because an evaluation may stop early.
        return torch.randperm(count, generator=self.split_generator(1))

    def default_augment(self) -> list[Augment]:
        from torchvision.transforms import v2

        moved = v2.RandomAffine(15, translate=(2.5 / 32, 2.5 / 32))
        return [moved, v2.RandomPerspective(distortion_scale=0.15)]
