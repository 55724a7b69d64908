"""Data modules: images in [0, 1] with their labels and indices."""

from lightning_rob.data.base import ImageData as ImageData
from lightning_rob.data.downloads import CIFAR10 as CIFAR10
from lightning_rob.data.downloads import CIFAR100 as CIFAR100
from lightning_rob.data.downloads import GTSRB as GTSRB
from lightning_rob.data.downloads import MNIST as MNIST
from lightning_rob.data.downloads import SVHN as SVHN
from lightning_rob.data.downloads import FashionMNIST as FashionMNIST
from lightning_rob.data.embedded import Digits5k as Digits5k
from lightning_rob.data.embedded import Patches10 as Patches10
from lightning_rob.data.folders import Images as Images
from lightning_rob.data.source_target import SourceTargetData as SourceTargetData
