"""The spread of a random defense's gradients from draw to draw."""

from typing import Any

import torch
from torch import Tensor

from lightning_rob.metrics.robust_accuracy import ImageSums

NAMES = ("variance", "cosine", "agreement", "variance_of_nonzero")


def gradient_spread(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the spread of the signs of several draws' gradients (RT paper, section 6, eq. 17).

    Args:
        gradients: [n, B, …] of n >= 2 draws, as returned by `lightning_rob.attacks.draw_gradients`;
            only their signs count.

    Returns:
        Each [B]: the variance of an entry (the paper's, which its authors' code multiplies by the
        number of entries; 0 … n / (n - 1)), the mean cosine of a draw to the mean of the draws, the
        share of entries with the sign of the mean, and the variance divided by the share of
        non-zero entries. Zero entries, of a transform that erases or clamps pixels, hardly vary:
        with many of them the variance mostly measures their share.
    """
    signs = gradients.flatten(2).sign()
    mean = signs.mean(0)
    variance = (signs - mean).square().sum(0).mean(1) / (len(signs) - 1)
    cosine = torch.cosine_similarity(signs, mean.expand_as(signs), dim=2).mean(0)
    agreement = (signs == mean.sign()).to(signs).mean((0, 2))
    nonzero = signs.abs().mean((0, 2))
    return variance, cosine, agreement, torch.where(nonzero > 0, variance / nonzero, 0.0)


class GradientSpread(ImageSums):
    """The means of `gradient_spread` over all images."""

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(4, **kwargs)

    def update(self, gradients: Tensor) -> None:
        """Add a batch: gradients [n, B, …] of n >= 2 draws."""
        self.add(torch.stack(gradient_spread(gradients)))

    def compute(self) -> dict[str, Tensor]:
        """Return the means, named variance, cosine, agreement and variance_of_nonzero."""
        return dict(zip(NAMES, (self.total / self.count).float(), strict=True))
