"""VGG (Simonyan and Zisserman 2015) with batch normalisation, for 32x32 images."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from lightning_rob.nets.pooling import spatial_mean

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions


def _stage(inputs: int, width: int, depth: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (inputs, *(width,) * (depth - 1)):
        conv = nn.Conv2d(channels, width, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2)]


class VGG16(nn.Module):
    """VGG-16 of ARC's CIFAR tables: thirteen 3x3 convolutions and one linear layer.

    Images have at least 32x32 pixels. Its entries are named as in the checkpoints of ARC
    (features.0 … features.41, classifier).

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
        inputs = (len(mean), *(width for width, _ in STAGES))
        stages = [_stage(i, *stage) for i, stage in zip(inputs, STAGES, strict=False)]
        self.features = nn.Sequential(*(layer for stage in stages for layer in stage))
        self.classifier = nn.Linear(STAGES[-1][0], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(spatial_mean(self.features(self.normalize(x))))
