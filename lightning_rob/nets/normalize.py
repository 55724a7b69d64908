"""First layer of every network: from [0, 1] to zero mean and unit standard deviation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
USUAL = {1: (MNIST_MEAN, MNIST_STD), 3: (CIFAR10_MEAN, CIFAR10_STD)}


def with_channels(x: Tensor, channels: int) -> Tensor:
    """Return the images; raise ValueError unless they are [B, channels, H, W]."""
    if x.ndim != 4:
        raise ValueError(f"network expects images of shape [B, C, H, W], got {list(x.shape)}")
    if x.shape[1] != channels:
        raise ValueError(f"network expects {channels} channels, got {x.shape[1]}")
    return x


# A traced network keeps the check: without it a grey image would broadcast to three channels.
torch.fx.wrap("with_channels")


class Normalize(nn.Module):
    """Normalise each channel, (x - mean) / std.

    Args:
        mean: [C] of images in [0, 1].
        std: [C], positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(f"mean has {len(mean)} channels, std has {len(std)}")
        if min(std) <= 0:
            raise ValueError(f"std must be positive, got {list(std)}")
        self.channels = len(mean)
        # Not persistent: published checkpoints have no such entries; the configuration has them.
        for name, numbers in (("mean", mean), ("std", std)):
            per_channel = torch.tensor([float(number) for number in numbers]).reshape(-1, 1, 1)
            self.register_buffer(name, per_channel, persistent=False)

    @classmethod
    def usual(
        cls, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> "Normalize":
        """Build the layer; None means MNIST's numbers for grey and CIFAR-10's for colour images."""
        known = USUAL.get(channels)
        if known is None and (mean is None or std is None):
            raise ValueError(f"images of {channels} channels need a mean and a std")
        usual_mean, usual_std = known or ((), ())
        layer = cls(mean or usual_mean, std or usual_std)
        if layer.channels != channels:
            raise ValueError(f"{channels} channels, but mean and std have {layer.channels}")
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return (with_channels(x, self.channels) - self.mean) / self.std
