"""GTSRB, the German traffic signs (Stallkamp et al. 2012)."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lightning_rob.data.image_data import ImageData, at_least
from lightning_rob.data.samples import Augment, Pixels

SIGNS = 43  # classes there are


class GTSRB(ImageData):
    """Traffic signs of 43 kinds at 32x32, by default those of the first ten: 4,800 to test.

    Training images are those of the 2011 competition, as torchvision fetches them: fewer than in
    other copies. The photographs of one sign come in a row of 30, so that validation images, drawn
    at random, are much like some that are trained on.

    Args:
        root: folder that has, or is to have, `gtsrb`.
        download: fetch the files if they are missing.
        classes: K, the signs of classes 0 … K - 1; URejectron's experiments have 10, there are 43.
        equalize: equalise the histogram of each channel of an image, as those experiments do.
        **options: see `ImageData`; training images are rotated by up to 15 degrees, shifted by up
            to 2.5 pixels and seen at an angle, unless `augment` is given.

    Raises:
        ValueError: more classes than there are.
    """

    channels = 3
    size = 32
    mean = (0.5, 0.5, 0.5)  # of an equalised histogram, whose deviation is 1 / sqrt(12)
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
        """Download if asked to.

        Raises:
            FileNotFoundError: the files are not there.
        """
        for train in (True, False):
            self._files(train, self.download)

    def source(self, train: bool) -> Pixels:
        """All training or test images of the classes."""
        files = [file for file in self._files(train) if file[1] < self.classes]
        images = torch.stack([self._read(path) for path, _ in files])
        return Pixels(images, [label for _, label in files])

    def test_order(self, count: int) -> Tensor:
        """Shuffled, for an evaluation may stop early."""
        return torch.randperm(count, generator=self.split_generator(1))

    def default_augment(self) -> list[Augment]:
        """Rotate, shift and look at an angle."""
        from torchvision.transforms import v2

        moved = v2.RandomAffine(15, translate=(2.5 / 32, 2.5 / 32))
        return [moved, v2.RandomPerspective(distortion_scale=0.15)]

    def _files(self, train: bool, download: bool = False) -> list[tuple[str, int]]:
        """Paths and classes."""
        from torchvision import datasets

        try:
            split = "train" if train else "test"
            opened = datasets.GTSRB(self.root, split=split, download=download)
        except (RuntimeError, FileNotFoundError) as error:
            raise FileNotFoundError(
                f"GTSRB is not in {Path(self.root).absolute() / 'gtsrb'}:"
                " pass --data.download=true, or --data.root=… if it is elsewhere"
            ) from error
        return list(opened._samples)  # no public name; else every image must be read

    def _read(self, path: str) -> Tensor:
        """[3, 32, 32] uint8."""
        from torchvision.transforms.v2 import functional

        with Image.open(path) as image:
            small = image.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR)
            pixels: Tensor = functional.pil_to_tensor(small)
        return functional.equalize(pixels) if self.equalize else pixels
