"""Networks: images [B, C, H, W] in [0, 1] to logits [B, K]; each normalises in its first layer."""

from lightning_rob.nets.checkpoint import load_weights
from lightning_rob.nets.normalize import Normalize
from lightning_rob.nets.preact import PreActResNet18
from lightning_rob.nets.resnet import ResNet, ResNet20, ResNet32
from lightning_rob.nets.small import LeNet, MNISTNet, SmallCNN
from lightning_rob.nets.zoo import ZooNet

__all__ = [
    "LeNet",
    "MNISTNet",
    "Normalize",
    "PreActResNet18",
    "ResNet",
    "ResNet20",
    "ResNet32",
    "SmallCNN",
    "ZooNet",
    "load_weights",
]
