"""Residual networks with pre-activation blocks for 32x32 images: WideResNet and PreActResNet18."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize


class PreActivation(nn.Module, ABC):
    """Residual block with batch norm and ReLU before each 3x3 convolution (He et al. 2016b).

    Subclasses hold the projection on the shortcut, under the name of their published checkpoints.

    Args:
        inputs: input channels.
        width: output channels.
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

    @abstractmethod
    def skip(self, x: Tensor, active: Tensor) -> Tensor:
        """Return the shortcut's term.

        Args:
            x: [B, inputs, H, W] the block's input.
            active: [B, inputs, H, W] the input after batch norm and ReLU.

        Returns:
            [B, width, H / stride, W / stride].
        """

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, inputs, H, W] -> [B, width, H / stride, W / stride]."""
        active = self.relu1(self.bn1(x))
        skipped = self.skip(x, active)
        residual: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(active))))
        return residual + skipped


def _projection(inputs: int, width: int, stride: int) -> nn.Conv2d | None:
    """Return the 1x1 convolution of the shortcut, None where the shape stays."""
    if stride == 1 and inputs == width:
        return None
    return nn.Conv2d(inputs, width, 1, stride=stride, bias=False)


class WideBlock(PreActivation):
    """Pre-activation block of `WideResNet`; its projection is called `convShortcut`.

    Args:
        inputs: input channels.
        width: output channels.
        stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.convShortcut = _projection(inputs, width, stride)

    def skip(self, x: Tensor, active: Tensor) -> Tensor:
        """Return the input, projected where the shape changes."""
        return x if self.convShortcut is None else self.convShortcut(active)


def _wide_stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Return blocks of one width, under the name `layer` as published."""
    rest = [WideBlock(width, width, 1) for _ in range(blocks - 1)]
    layer = nn.Sequential(WideBlock(inputs, width, stride), *rest)
    return nn.Sequential(OrderedDict(layer=layer))


def _kaiming(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class WideResNet(nn.Module):
    """Wide residual network of 6n + 4 layers without dropout (Zagoruyko and Komodakis 2016).

    Its entries are named as in the checkpoints of ARC and of TRADES (conv1, block1.layer.0.bn1 …
    bn1, fc); some of these hold an unused `sub_block1`, to be dropped when they are loaded.

    Args:
        depth: 6n + 4: 10, 16, 22, 28, 34, 40.
        widen: factor on the stages' widths of 16, 32 and 64 channels.
        classes: K.
        mean: [C] of images in [0, 1], one number per channel.
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
        self.block1 = _wide_stage(16, width, blocks, 1)
        self.block2 = _wide_stage(width, 2 * width, blocks, 2)
        self.block3 = _wide_stage(2 * width, 4 * width, blocks, 2)
        self.bn1 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4 * width, classes)
        self.apply(_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K] of images [B, C, H, W] in [0, 1]; 32x32 images are pooled at 8x8."""
        features = self.block2(self.block1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn1(self.block3(features)))
        out: Tensor = self.fc(features.mean((2, 3)))
        return out


class WRN28_4(WideResNet):
    """`WideResNet` of depth 28, four times as wide.

    Args:
        **options: those of `WideResNet` except depth and width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(depth=28, widen=4, **options)


class PreActBlock(PreActivation):
    """Pre-activation block of `PreActResNet18`; its projection is called `shortcut.0`.

    Args:
        inputs: input channels.
        width: output channels.
        stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        projection = _projection(inputs, width, stride)
        self.shortcut = None if projection is None else nn.Sequential(projection)

    def skip(self, x: Tensor, active: Tensor) -> Tensor:
        """Return the input, projected where the shape changes."""
        return x if self.shortcut is None else self.shortcut(active)


def _stage(inputs: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, width, stride), PreActBlock(width, width, 1))


class PreActResNet18(nn.Module):
    """ResNet-18 of ARC's CIFAR tables: pre-activation stages of 64, 128, 256 and 512 channels.

    Its entries are named as in the checkpoints of ARC (conv1, layer1.0.bn1 … bn, linear).

    Args:
        classes: K.
        mean: [C] of images in [0, 1], one number per channel.
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
        """Return logits [B, K] of images [B, C, H, W] in [0, 1]; 32x32 images are pooled at 4x4."""
        features = self.layer2(self.layer1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn(self.layer4(self.layer3(features))))
        out: Tensor = self.linear(features.mean((2, 3)))
        return out
