"""A small data set and a check of batches that the tests of data share."""

import torch
from torchvision.transforms import v2

from lightning_rob.data import ImageData
from lightning_rob.data.base import InMemoryImages


def grains(x):
    return x + torch.rand(x.shape)


class Dots(ImageData):
    """47 training images of 4x4 pixels that are noise, 10 for test."""

    classes, channels, size = 3, 1, 4

    def source(self, train):
        generator = torch.Generator().manual_seed(int(train))
        count = 47 if train else 10
        images = torch.randint(256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
        return InMemoryImages(images, torch.arange(count) % 3)


def dots(**options):
    defaults = {"batch_size": 8, "val_size": 10, "seed": 3}
    return Dots(**{**defaults, "augment": [v2.RandomHorizontalFlip(), grains], **options})


def check_batches(data):
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        x, y, index = next(iter(loader))
        assert x.shape[1:] == (data.channels, data.size, data.size)
        assert (x.dtype, y.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
        assert x.min() >= 0 and x.max() <= 1
        assert y.min() >= 0 and y.max() < data.classes
        assert len(data.mean) == len(data.std) == data.channels
