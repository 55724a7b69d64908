"""Networks: images [B, C, H, W] in [0, 1] to logits [B, K]; each normalises in its first layer."""

from lightning_rob.nets.dann import DANNNet, DANNResNet18
from lightning_rob.nets.hugging_face import TransformersNet
from lightning_rob.nets.mobilenet import MobileNetV1
from lightning_rob.nets.normalize import Normalize
from lightning_rob.nets.resnet import ResNet, ResNet20, ResNet32
from lightning_rob.nets.small import AthenaCNN, LeNet, MNISTNet, SmallCNN
from lightning_rob.nets.vgg import VGG16
from lightning_rob.nets.weights import load_weights, member_prefixes
from lightning_rob.nets.wide_resnet import WRN28_4, PreActResNet18, WideResNet
from lightning_rob.nets.zoo import ZooNet

__all__ = [
    "VGG16",
    "WRN28_4",
    "AthenaCNN",
    "DANNNet",
    "DANNResNet18",
    "LeNet",
    "MNISTNet",
    "MobileNetV1",
    "Normalize",
    "PreActResNet18",
    "ResNet",
    "ResNet20",
    "ResNet32",
    "SmallCNN",
    "TransformersNet",
    "WideResNet",
    "ZooNet",
    "load_weights",
    "member_prefixes",
]
