"""Residual networks with pre-activation blocks for 32x32 images: WideResNet and PreActResNet18."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_rob.nets.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from lightning_rob.nets.pooling import spatial_mean
from lightning_rob.nets.resnet import stage

Activation = Literal["relu", "silu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


class _SamePad(nn.Module):
    """TensorFlow's SAME padding of a 3x3 convolution of stride 2."""

    def forward(self, x: Tensor) -> Tensor:
        # Even sides get zeros below and to the right only.
        return pad(x, (x.shape[3] % 2, 1, x.shape[2] % 2, 1))


def _padding(stride: int, same: bool) -> tuple[nn.Module, int]:
    """Return a padding layer, and the padding of the 3x3 convolution behind it."""
    return (_SamePad(), 0) if same and stride > 1 else (nn.Identity(), 1)


class PreActBlock(nn.Module):
    """Residual block with batch norm and activation before each 3x3 convolution (He et al. 2016b).

    A stride of 2 halves height and width. The names of the layers on the shortcut are those of the
    published checkpoints: `convShortcut` of a "wide" block, else the last layer of `shortcut`.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, activation: str, same: bool, shortcut: str
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = ACTIVATIONS[activation]()
        self.pad1, padding = _padding(stride, same)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=padding, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = ACTIVATIONS[activation]()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.projects_active = shortcut in ("active", "wide")
        self.convShortcut = self.shortcut = None
        if stride == 1 and inputs == width:
            return
        if shortcut == "3x3":
            pad, padding = _padding(stride, same)
            conv = nn.Conv2d(inputs, width, 3, stride=stride, padding=padding, bias=False)
            self.shortcut = nn.Sequential(pad, conv)
        elif shortcut == "wide":
            self.convShortcut = nn.Conv2d(inputs, width, 1, stride=stride, bias=False)
        else:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.bn1(x))
        skipped = x
        projection = self.shortcut if self.convShortcut is None else self.convShortcut
        if projection is not None:
            skipped = projection(active if self.projects_active else x)
        residual: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(self.pad1(active)))))
        return residual + skipped


class WideResNet(nn.Module):
    """Wide residual network of 6n + 4 layers without dropout (Zagoruyko and Komodakis 2016).

    Its entries are named as in the checkpoints of ARC and of TRADES (conv1, block1.layer.0.bn1 …
    bn1, fc); some of these hold an unused `sub_block1`, to be dropped when they are loaded. The
    network of Gowal et al. 2020 (section 2, appendix A) has `activation="silu", same=True`.

    Args:
        depth: 6n + 4: 10, 16, 22, 28, 34, 40.
        widen: factor on the stages' widths of 16, 32 and 64 channels.
        mean: [C] of images in [0, 1], like std, one number per channel.
        activation: "relu", or "silu" (Swish), x sigmoid(x).
        same: TensorFlow's SAME padding of strided convolutions: of even sides below and to the
            right only.
    """

    def __init__(
        self,
        depth: int = 28,
        widen: int = 4,
        classes: int = 10,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
        activation: Activation = "relu",
        same: bool = False,
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 34, …), got {depth}")
        if widen < 1:
            raise ValueError(f"widen must be at least 1, got {widen}")
        blocks, width = (depth - 4) // 6, 16 * widen
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(len(mean), 16, 3, padding=1, bias=False)

        def block(inputs: int, width: int, stride: int) -> nn.Sequential:
            layer = stage(PreActBlock, inputs, width, blocks, stride, activation, same, "wide")
            return nn.Sequential(OrderedDict(layer=layer))  # a name of the published checkpoints

        self.block1 = block(16, width, 1)
        self.block2 = block(width, 2 * width, 2)
        self.block3 = block(2 * width, 4 * width, 2)
        self.bn1 = nn.BatchNorm2d(4 * width)
        self.relu = ACTIVATIONS[activation]()
        self.fc = nn.Linear(4 * width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of convolutions and of the linear layer anew, after their own draws."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        features = self.block2(self.block1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn1(self.block3(features)))
        return self.fc(spatial_mean(features))


class WRN28_4(WideResNet):
    """`WideResNet` of depth 28, four times as wide."""

    def __init__(self, **options: Any) -> None:
        super().__init__(depth=28, widen=4, **options)


class PreActResNet18(nn.Module):
    """ResNet-18 of ARC's CIFAR tables: pre-activation stages of 64, 128, 256 and 512 channels.

    Its entries are named as in the checkpoints of ARC (conv1, layer1.0.bn1 … bn, linear). That of
    Gowal et al. 2020 has `activation="silu", shortcut="3x3", same=True`.

    Args:
        mean: [C] of images in [0, 1], like std, one number per channel.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        activation: "relu", or "silu" (Swish), x sigmoid(x).
        shortcut: the projection where the shape changes: 1x1 of the "active" input, behind batch
            norm and activation, 1x1 of the block's "input" itself, or "3x3" of the block's input.
        same: TensorFlow's SAME padding of strided 3x3 convolutions, below and to the right only.
        final_norm: batch norm and activation before the mean over the image.
    """

    def __init__(
        self,
        classes: int = 10,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
        width: int = 64,
        activation: Activation = "relu",
        shortcut: Literal["active", "input", "3x3"] = "active",
        same: bool = False,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        if shortcut not in ("active", "input", "3x3"):
            raise ValueError(f"shortcut must be one of active, input, 3x3, got {shortcut!r}")
        self.normalize = Normalize(mean, std)
        self.conv1 = nn.Conv2d(len(mean), width, 3, padding=1, bias=False)
        self.layer1 = stage(PreActBlock, width, width, 2, 1, activation, same, shortcut)
        self.layer2 = stage(PreActBlock, width, 2 * width, 2, 2, activation, same, shortcut)
        self.layer3 = stage(PreActBlock, 2 * width, 4 * width, 2, 2, activation, same, shortcut)
        self.layer4 = stage(PreActBlock, 4 * width, 8 * width, 2, 2, activation, same, shortcut)
        self.bn = nn.BatchNorm2d(8 * width) if final_norm else nn.Identity()
        self.relu = ACTIVATIONS[activation]() if final_norm else nn.Identity()
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer2(self.layer1(self.conv1(self.normalize(x))))
        features = self.relu(self.bn(self.layer4(self.layer3(features))))
        return self.linear(spatial_mean(features))
