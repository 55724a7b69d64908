"""Zero mean and unit deviation, of which [0, 1] is kept.

What is below the mean becomes black: nineteen pixels in twenty of a digit. The gradient passes
through as if it did not, for an attack would not see those pixels otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_rob.transforms.base import Transform, pinned

FLAT = 1e-6  # as Keras
USUAL = {  # those of `lightning_rob.nets.Normalize`
    1: ((0.1307,), (0.3081,)),
    3: ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
}


@dataclass(frozen=True)
class NormaliseImage(Transform):
    """Subtract the image's own mean, divide by its own deviation; what is below the mean is black.

    As Keras' `samplewise_center` and `samplewise_std_normalization`, over all channels together.
    """

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        dims = (1, 2, 3)
        deviation = x.std(dims, correction=0, keepdim=True)
        return pinned((x - x.mean(dims, keepdim=True)) / (deviation + FLAT), 0, 1)


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
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {list(self.std)}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        usual = USUAL.get(x.shape[1], (None, None))
        numbers = [own or known for own, known in zip((self.mean, self.std), usual, strict=True)]
        if any(values is None or len(values) != x.shape[1] for values in numbers):
            raise ValueError(f"images of {x.shape[1]} channels need as many in mean and std")
        mean, std = (x.new_tensor(values)[:, None, None] for values in numbers)
        return pinned((x - mean) / std, 0, 1)
