"""Data sets without a download: 5,000 MNIST digits, and crops of ten photographs."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_rob.data.base import ImageData, InMemoryImages
from lightning_rob.runtime.errors import at_least

CELL = 96  # pixels
CROP = 64
KINDS = {"train": (0, 2), "val": (1,), "test": (3,)}  # (row + column) % 4 of a cell
PHOTOS = {
    "astronaut": ("skimage", "data/astronaut.png"),  # public domain, NASA
    "cat": ("skimage", "data/chelsea.png"),  # CC0, Stefan van der Walt
    "coffee": ("skimage", "data/coffee.png"),  # CC0, Rachel Michetti
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),  # public domain, NASA
    "tissue": ("skimage", "data/ihc.png"),  # no known restrictions, CMMI
    # Middlebury 2014 stereo, no licence stated
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),  # CC0, Mikael Häggström
    "rocket": ("skimage", "data/rocket.jpg"),  # public domain, SpaceX
    "china": ("sklearn", "datasets/images/china.jpg"),  # CC BY 2.0, danielbuechele
    "flower": ("sklearn", "datasets/images/flower.jpg"),  # CC BY 2.0, vultilion
}


@cache
def _digits() -> Tensor:
    with np.load(Path(__file__).with_name("mnist_5k.npz")) as file:
        return torch.from_numpy(file["digits"])


class Digits5k(ImageData):
    """5,000 MNIST digits, part of this package: 400 of each digit to train, 100 to test.

    A batch is (images, labels, index). Results on them cannot be compared with results on MNIST.

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
        # Ten different digits in every ten in a row. Each digit has an order of its own, the same
        # for the training and the test images.
        draws = torch.rand(10, 500, generator=self.split_generator(1))
        chosen = draws.argsort(1)[:, 100:] if train else draws.argsort(1)[:, :100]
        images = _digits()[torch.arange(10), chosen.T]
        return InMemoryImages(images.flatten(0, 1), torch.arange(10).repeat(len(images)))


@cache
def photo(name: str) -> Tensor:
    """Return a photograph [3, H, W] uint8 from an installed package, which is not imported."""
    package, path = PHOTOS[name]
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    with Image.open(Path(spec.origin).parent / path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def cells(height: int, width: int, kind: str) -> Tensor:
    """Return the upper left corners [N, 2] of an image's cells for training, val or test.

    On a checkerboard, black cells are for training, white ones in turn for validation and test.
    """
    grid = torch.cartesian_prod(torch.arange(height // CELL), torch.arange(width // CELL))
    wanted = torch.tensor(KINDS[kind])
    return grid[torch.isin(grid.sum(1) % 4, wanted)] * CELL


def crops(photo: Tensor, kind: str, count: int, generator: torch.Generator) -> Tensor:
    """Draw random crops [N, 3, 32, 32] of a photograph, each from one cell, at half their size."""
    corners = cells(photo.shape[1], photo.shape[2], kind)
    cell = corners[torch.randint(len(corners), (count,), generator=generator)]
    place = cell + torch.randint(CELL - CROP + 1, (count, 2), generator=generator)
    rows, columns = (place[..., None] + torch.arange(0, CROP, 2)).unbind(1)
    row, column = rows[:, :, None], columns[:, None, :]
    # The mean of 2x2 neighbours halves the size without aliasing.
    four = [photo[:, row + i, column + j].float() for i in (0, 1) for j in (0, 1)]
    return torch.stack(four).mean(0).round().to(torch.uint8).transpose(0, 1)


class Patches10(ImageData):
    """Crops of ten photographs of scikit-image and scikit-learn; the class is the photograph.

    Training, validation and test crops come from disjoint cells: no pixel is in two of them.
    Results on them cannot be compared with those of other data sets.

    Args:
        train_size: training images.
        test_size: test images.
        val_size: validation images, in addition to the training images.
        **options: see `ImageData`; the crops depend on `split_seed`.
    """

    classes = 10
    channels = 3
    size = 32
    mean = (0.481, 0.372, 0.326)
    std = (0.319, 0.256, 0.261)

    def __init__(
        self, train_size: int = 5000, test_size: int = 1000, val_size: int = 500, **options: Any
    ) -> None:
        super().__init__(val_size=val_size, **options)
        at_least(1, train_size=train_size, test_size=test_size)
        self.train_size = train_size
        self.test_size = test_size

    def source(self, train: bool) -> InMemoryImages:
        if not train:
            return InMemoryImages(*self._crops("test", self.test_size))
        train_images, train_labels = self._crops("train", self.train_size)
        val_images, val_labels = self._crops("val", self.val_size)
        images = torch.cat([train_images, val_images])
        return InMemoryImages(images, torch.cat([train_labels, val_labels]))

    def hold_out(self, count: int) -> tuple[Tensor, Tensor]:
        # In order: validation images have cells of their own.
        return torch.arange(self.train_size), torch.arange(self.train_size, count)

    def _crops(self, kind: str, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % self.classes  # the photographs take turns
        images = torch.empty(count, 3, CROP // 2, CROP // 2, dtype=torch.uint8)
        for label, name in enumerate(PHOTOS):
            generator = self.split_generator(list(KINDS).index(kind), label)
            turns = labels == label
            images[turns] = crops(photo(name), kind, int(turns.sum()), generator)
        return images, labels
