"""Small networks for MNIST and the embedded data sets; they train in seconds on a CPU."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_rob.nets.normalize import Normalize
from lightning_rob.nets.pooling import spatial_mean


def _stage(inputs: int, width: int, slope: float = 0.0) -> nn.Sequential:
    conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
    activation = nn.LeakyReLU(slope) if slope else nn.ReLU()
    return nn.Sequential(conv, nn.BatchNorm2d(width), activation, nn.MaxPool2d(2))


def _head(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    first, last = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with batch normalisation, then the mean over the image.

    Images may have any size from 8x8 up.

    Args:
        channels: C, 1 for grey and 3 for colour.
        width: channels of the first convolution; the others have 2 and 4 times as many.
        mean: [C] of images in [0, 1], like std; None: MNIST's for grey, CIFAR-10's for colour.
        slope: slope of the activations below zero: 0 is ReLU, another one LeakyReLU.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 1,
        width: int = 16,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        slope: float = 0.0,
    ) -> None:
        super().__init__()
        self.normalize = Normalize.usual(channels, mean, std)
        self.layer1 = _stage(channels, width, slope)
        self.layer2 = _stage(width, 2 * width, slope)
        self.layer3 = _stage(2 * width, 4 * width, slope)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer3(self.layer2(self.layer1(self.normalize(x))))
        return self.linear(spatial_mean(features))


class MNISTNet(nn.Module):
    """Two 3x3 convolutions with batch normalisation and two linear layers.

    RMC's MNIST experiments name this architecture (2 conv, 2 fc, BN) without its widths.

    Args:
        width: channels of the first convolution; the second has twice as many, the hidden layer
            8 times.
        size: height and width of the images in pixels.
        mean: [C] of images in [0, 1], like std; None: MNIST's for grey, CIFAR-10's for colour.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 1,
        width: int = 16,
        size: int = 28,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.normalize = Normalize.usual(channels, mean, std)
        self.features = nn.Sequential(_stage(channels, width), _stage(width, 2 * width))
        self.head = _head(2 * width * (size // 4) ** 2, 8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.normalize(x)))


class AthenaCNN(nn.Module):
    """Sub-model of Athena (Meng et al. 2020): 3x3 convolutions of 32 and 64 channels, 4096 hidden.

    The architecture is that of the released code; the paper mentions three convolutions.

    Args:
        size: height and width of the images in pixels.
        hidden: units of the first linear layer.
        dropout: share of these units dropped in a training step.
        mean: [C] of images in [0, 1], like std; None: MNIST's for grey, CIFAR-10's for colour.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 1,
        size: int = 28,
        hidden: int = 4096,
        dropout: float = 0.4,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.normalize = Normalize.usual(channels, mean, std)
        first, second = nn.Conv2d(channels, 32, 3), nn.Conv2d(32, 64, 3)
        self.features = nn.Sequential(
            first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        side = ((size - 2) // 2 - 2) // 2
        self.hidden = nn.Linear(64 * side**2, hidden)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(self.normalize(x))
        # Only dropout is between both layers: in evaluation they are one linear map, which is
        # cheaper computed as one, unless a hook looks at what the last layer is given.
        if self.training or self.linear._forward_pre_hooks:
            return self.linear(self.dropout(self.hidden(features)))
        weight = self.linear.weight @ self.hidden.weight
        bias = self.linear.weight @ self.hidden.bias + self.linear.bias
        return linear(features, weight, bias)


class LeNet(nn.Module):
    """LeNet of TADV's MNIST experiments: 5x5 convolutions of 32 and 64 channels, 1024 hidden.

    Args:
        size: height and width of the images in pixels.
        mean: [C] of images in [0, 1], like std; None: MNIST's for grey, CIFAR-10's for colour.
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 1,
        size: int = 28,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.normalize = Normalize.usual(channels, mean, std)
        first, second = nn.Conv2d(channels, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.features = nn.Sequential(
            first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = _head(64 * (size // 4) ** 2, 1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.normalize(x)))
