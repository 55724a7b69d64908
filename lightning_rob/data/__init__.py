"""Data modules: images in [0, 1] with their labels and indices."""

from lightning_rob.data.base import ImageData
from lightning_rob.data.downloads import CIFAR10, CIFAR100, GTSRB, MNIST, SVHN, FashionMNIST
from lightning_rob.data.embedded import Digits5k, Patches10
from lightning_rob.data.folders import Images
from lightning_rob.data.source_target import SourceTargetData

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "GTSRB",
    "MNIST",
    "SVHN",
    "Digits5k",
    "FashionMNIST",
    "ImageData",
    "Images",
    "Patches10",
    "SourceTargetData",
]
