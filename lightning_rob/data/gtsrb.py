"""GTSRB, German traffic signs (Stallkamp et al. 2012)."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lightning_rob.data.base import Augment, ImageData, InMemoryImages
from lightning_rob.runtime.errors import at_least

SIGNS = 43  # classes of the data set


class GTSRB(ImageData):
    """Traffic signs of 43 classes at 32x32, by default of the first ten: 4,800 images to test.

    Training images are those of the 2011 competition, as torchvision downloads them: fewer than in
    other copies. The data set has 30 photographs of each sign in a row, so that validation images,
    drawn at random, resemble some of the training images.

    Training images are rotated by up to 15 degrees, shifted by up to 2.5 pixels and seen at an
    angle, unless `augment` is given.

    Args:
        root: folder that contains, or will receive, `gtsrb`.
        download: download the files if they are missing.
        classes: K, the signs of classes 0 … K - 1, at most 43; URejectron's experiments have 10.
        equalize: equalise the histogram of each channel of an image, as those experiments do.
        **options: see `ImageData`.

    Raises:
        ValueError: more classes than the data set has.
    """

    channels = 3
    size = 32
    mean = (0.5, 0.5, 0.5)  # of a flat histogram: its standard deviation is 1 / sqrt(12)
    std = (0.29, 0.29, 0.29)

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        classes: int = 10,
        equalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(2, classes=classes)
        if classes > SIGNS:
            raise ValueError(f"classes must be at most {SIGNS}, got {classes}")
        self.root = root
        self.download = download
        self.classes = classes
        self.equalize = equalize

    def prepare_data(self) -> None:
        """Download the files if asked to.

        Raises:
            FileNotFoundError: the files are missing.
        """
        for train in (True, False):
            self._files(train, self.download)

    def source(self, train: bool) -> InMemoryImages:
        """Return all training or test images of the classes."""
        files = [file for file in self._files(train) if file[1] < self.classes]
        images = torch.stack([self._read(path) for path, _ in files])
        return InMemoryImages(images, [label for _, label in files])

    def test_order(self, count: int) -> Tensor:
        """Return a shuffled order, because an evaluation may stop early."""
        return torch.randperm(count, generator=self.split_generator(1))

    def default_augment(self) -> list[Augment]:
        """Rotate, shift and change the perspective."""
        from torchvision.transforms import v2

        moved = v2.RandomAffine(15, translate=(2.5 / 32, 2.5 / 32))
        return [moved, v2.RandomPerspective(distortion_scale=0.15)]

    def _files(self, train: bool, download: bool = False) -> list[tuple[str, int]]:
        """Return paths and classes of the images."""
        from torchvision import datasets

        try:
            split = "train" if train else "test"
            opened = datasets.GTSRB(self.root, split=split, download=download)
        except (RuntimeError, FileNotFoundError) as error:
            raise FileNotFoundError(
                f"GTSRB is not in {Path(self.root).absolute() / 'gtsrb'}:"
                " pass --data.download=true, or --data.root=… if it is elsewhere"
            ) from error
        return list(opened._samples)  # not public, but else every image would have to be read

    def _read(self, path: str) -> Tensor:
        """Read an image, [3, 32, 32] uint8."""
        from torchvision.transforms.v2 import functional

        with Image.open(path) as image:
            small = image.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR)
            pixels: Tensor = functional.pil_to_tensor(small)
        return functional.equalize(pixels) if self.equalize else pixels
