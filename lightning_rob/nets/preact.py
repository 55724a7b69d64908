"""The 18-layer residual network with activations first (He et al. 2016b) for 32x32 images."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize


class PreActBlock(nn.Module):
    """Two times batch norm, ReLU and 3x3 convolution, around which the input is added.

    Args:
        inputs: channels that come in.
        width: channels that go out.
        stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, width, H / stride, W / stride]."""
        active = self.relu1(self.bn1(x))
        skipped = x if self.shortcut is None else self.shortcut(active)
        residual: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(active))))
        return residual + skipped


def _stage(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, width, stride), PreActBlock(width, width, 1))


class PreActResNet18(nn.Module):
    """What ARC's CIFAR tables call ResNet-18: stages of 64, 128, 256 and 512 channels.

    Its entries are named as in the checkpoints of ARC (conv1, layer1.0.bn1 … bn, linear).

    Args:
        classes: K.
        mean: [C] of images in [0, 1]; as many as the images have channels.
        std: [C], likewise.
    """

    def __init__(
        self,
        classes: int = 10,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(len(mean), 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, 1)
        self.layer2 = _stage(64, 128, 2)
        self.layer3 = _stage(128, 256, 2)
        self.layer4 = _stage(256, 512, 2)
        self.bn = nn.BatchNorm2d(512)
        self.relu = nn.ReLU()
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of images [B, C, H, W] in [0, 1]; at 32x32 the mean is over 4x4."""
        features = self.layer2(self.layer1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn(self.layer4(self.layer3(features))))
        out: Tensor = self.linear(features.mean((2, 3)))
        return out
