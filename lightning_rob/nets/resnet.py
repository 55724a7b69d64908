"""Residual networks for 32x32 images (He et al. 2016, section 4.2)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from lightning_rob.nets.pooling import spatial_mean


@torch.fx.wrap  # a traced network keeps the choice
def _subsampled(x: Tensor, stride: int) -> Tensor:
    if x.is_contiguous():
        return x[:, :, ::stride, ::stride]
    # The gradient of a slice is contiguous: of this one channels come last, as in x.
    return x.permute(0, 2, 3, 1)[:, ::stride, ::stride].permute(0, 3, 1, 2)


class PaddedShortcut(nn.Module):
    """Shortcut of option A: subsample the image, pad with `added` zero channels on both sides."""

    def __init__(self, added: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = added, stride

    def forward(self, x: Tensor) -> Tensor:
        below = self.added // 2
        return F.pad(_subsampled(x, self.stride), (0, 0, 0, 0, below, self.added - below))


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions, its shortcut "A" or "B" where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (width, 1) and shortcut == "A":
            self.shortcut = PaddedShortcut(width - inputs, stride)
        elif (inputs, stride) != (width, 1):
            conv = nn.Conv2d(inputs, width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(residual + self.shortcut(x))


def stage(
    block: type[nn.Module], inputs: int, width: int, blocks: int, stride: int, *options: Any
) -> nn.Sequential:
    """Return some blocks, the first of which changes the shape."""
    first = block(inputs, width, stride, *options)
    return nn.Sequential(first, *(block(width, width, 1, *options) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """CIFAR residual network of 6n + 2 layers (He et al. 2016, section 4.2).

    Its entries are named as in the checkpoints of ARC (conv1, bn1, layer1.0.conv1 … linear).

    Args:
        depth: 6n + 2: 20, 32, 44, 56, 110.
        widths: channels of the stages; TADV's "ResNet-20" has (64, 128, 256) and shortcut B.
        shortcut: "A" subsamples and pads with zero channels, "B" is convolution and batch norm.
        mean: [C] of images in [0, 1], like std, one number per channel.
    """

    def __init__(
        self,
        depth: int = 20,
        classes: int = 10,
        widths: tuple[int, int, int] = (16, 32, 64),
        shortcut: Literal["A", "B"] = "A",
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth must be 6n + 2 (8, 14, 20, 32, …), got {depth}")
        if shortcut not in ("A", "B"):
            raise ValueError(f"shortcut must be 'A' or 'B', got {shortcut!r}")
        blocks = (depth - 2) // 6
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(len(mean), widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu1 = nn.ReLU()
        self.layer1 = stage(BasicBlock, widths[0], widths[0], blocks, 1, shortcut)
        self.layer2 = stage(BasicBlock, widths[0], widths[1], blocks, 2, shortcut)
        self.layer3 = stage(BasicBlock, widths[1], widths[2], blocks, 2, shortcut)
        self.linear = nn.Linear(widths[2], classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of convolutions and of the linear layer anew, after their own draws."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        features = self.relu1(self.bn1(self.conv1(self.normalize(x))))
        features = self.layer3(self.layer2(self.layer1(features)))
        return self.linear(spatial_mean(features))


class ResNet20(ResNet):
    """`ResNet` of depth 20."""

    def __init__(self, **options: Any) -> None:
        super().__init__(depth=20, **options)


class ResNet32(ResNet):
    """`ResNet` of depth 32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(depth=32, **options)
