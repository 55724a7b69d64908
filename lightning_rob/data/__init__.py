"""Data modules: images in [0, 1] with their labels and indices."""

from lightning_rob.data.cifar import CIFAR10, CIFAR100
from lightning_rob.data.digits import Digits5k
from lightning_rob.data.gtsrb import GTSRB
from lightning_rob.data.image_data import ImageData
from lightning_rob.data.images import Images
from lightning_rob.data.mnist import MNIST, FashionMNIST
from lightning_rob.data.patches import Patches10
from lightning_rob.data.source_target import SourceTargetData
from lightning_rob.data.svhn import SVHN

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
