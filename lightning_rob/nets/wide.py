"""Wide residual networks (Zagoruyko and Komodakis 2016) for 32x32 images."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize


class WideBlock(nn.Module):
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
        self.convShortcut: nn.Conv2d | None = None  # named as published
        if inputs != width:
            self.convShortcut = nn.Conv2d(inputs, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, width, H / stride, W / stride]."""
        active = self.relu1(self.bn1(x))
        skipped = x if self.convShortcut is None else self.convShortcut(active)
        residual: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(active))))
        return residual + skipped


class WideStage(nn.Module):
    """Blocks of one width, under the name `layer`, as published.

    Args:
        inputs: channels that come in.
        width: channels that go out.
        blocks: how many.
        stride: of the first block.
    """

    def __init__(self, inputs: int, width: int, blocks: int, stride: int) -> None:
        super().__init__()
        rest = [WideBlock(width, width, 1) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(WideBlock(inputs, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, width, H / stride, W / stride]."""
        out: Tensor = self.layer(x)
        return out


def _kaiming(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class WideResNet(nn.Module):
    """The wide residual network of 6n + 4 layers, without dropout.

    Its entries are named as in the checkpoints of ARC and of TRADES (conv1, block1.layer.0.bn1 …
    bn1, fc); an unused `sub_block1` in some of these is to be dropped when they are loaded.

    Args:
        depth: 6n + 4: 10, 16, 22, 28, 34, 40.
        widen: how many times wider the stages are than 16, 32 and 64 channels.
        classes: K.
        mean: [C] of images in [0, 1]; as many as the images have channels.
        std: [C], likewise.

    Raises:
        ValueError: there is no network of this depth or width.
    """

    def __init__(
        self,
        depth: int = 28,
        widen: int = 4,
        classes: int = 10,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 34, …), got {depth}")
        if widen < 1:
            raise ValueError(f"widen must be at least 1, got {widen}")
        blocks, width = (depth - 4) // 6, 16 * widen
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(len(mean), 16, 3, padding=1, bias=False)
        self.block1 = WideStage(16, width, blocks, 1)
        self.block2 = WideStage(width, 2 * width, blocks, 2)
        self.block3 = WideStage(2 * width, 4 * width, blocks, 2)
        self.bn1 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4 * width, classes)
        self.apply(_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of images [B, C, H, W] in [0, 1]; at 32x32 the mean is over 8x8."""
        features = self.block2(self.block1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn1(self.block3(features)))
        out: Tensor = self.fc(features.mean((2, 3)))
        return out


class WRN28_4(WideResNet):
    """`WideResNet` of depth 28, four times as wide.

    Args:
        **options: those of `WideResNet` but for depth and width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(depth=28, widen=4, **options)
