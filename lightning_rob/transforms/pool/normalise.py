"""Zero mean and unit deviation, of which [0, 1] is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_rob.nets.normalize import Normalize
from lightning_rob.transforms.base import Transform

FLAT = 1e-6  # as Keras


@dataclass(frozen=True)
class NormaliseImage(Transform):
    """Subtract the image's own mean, divide by its own deviation; what is below the mean is black.

    As Keras' `samplewise_center` and `samplewise_std_normalization`, over all channels together.
    """

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], not clipped."""
        dims = (1, 2, 3)
        deviation = x.std(dims, correction=0, keepdim=True)
        return (x - x.mean(dims, keepdim=True)) / (deviation + FLAT)


@dataclass(frozen=True)
class NormaliseFeature(Transform):
    """Subtract the mean of a data set, divide by its deviation; what is below the mean is black.

    Athena's code fits Keras' `featurewise_center` anew on each batch that it transforms, so that
    one image's result depends on the others; here the numbers are fixed.

    Args:
        mean: one number per channel; None: MNIST's for grey, CIFAR-10's for colour.
        std: likewise.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            object.__setattr__(self, name, numbers and tuple(numbers))

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], not clipped."""
        layer: Normalize = Normalize.usual(x.shape[1], self.mean, self.std).to(x)
        return layer.forward(x)
