"""Data modules: images in [0, 1] with their labels and indices."""

from lightning_rob.data.base import ImageData
from lightning_rob.data.cifar import CIFAR10, CIFAR100, SVHN
from lightning_rob.data.folders import Images
from lightning_rob.data.gtsrb import GTSRB
from lightning_rob.data.mnist import MNIST, Digits5k, FashionMNIST
from lightning_rob.data.patches import Patches10
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
