"""MobileNetV1 (Howard et al. 2017) for 32x32 images."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from lightning_rob.nets.pooling import spatial_mean

WIDTHS = (32, 64, 128, 128, 256, 256, *(512,) * 6, 1024, 1024)
STRIDES = (1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1)  # ImageNet's would halve 32x32 too often


def _conv(inputs: int, width: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, width, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width), nn.ReLU()]


class MobileNetV1(nn.Module):
    """MobileNetV1 of ARC's CIFAR tables: width 1, three strides of 2, plain ReLU.

    Its entries are named as in the checkpoints of ARC (features.0.0, features.1.3 … classifier).

    Args:
        mean: [C] of images in [0, 1], like std, one number per channel.
    """

    def __init__(
        self,
        classes: int = 10,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        first = nn.Sequential(*_conv(len(mean), WIDTHS[0], 3))
        shapes = zip(pairwise(WIDTHS), STRIDES, strict=True)
        # A block is a depthwise 3x3 convolution, then a pointwise 1x1 convolution.
        blocks = [
            nn.Sequential(*_conv(inputs, inputs, 3, stride, inputs), *_conv(inputs, width, 1))
            for (inputs, width), stride in shapes
        ]
        self.features = nn.Sequential(first, *blocks)
        self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(spatial_mean(self.features(self.normalize(x))))
