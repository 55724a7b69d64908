"""How much a random defense's gradients differ from draw to draw."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def gradient_spread(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The spread of the signs of several draws' gradients (RT paper, section 6 and eq. 17).

    Args:
        gradients: [n, B, …] of n >= 2 draws, as `lightning_rob.attacks.draw_gradients` gives them;
            signed here.

    Returns:
        Each [B]: the variance of an entry (the paper's, which its authors' code multiplies by the
        number of entries; 0 … n / (n - 1)), the mean cosine of a draw to the mean of the draws, the
        share of entries whose sign is that of the mean, and the variance divided by the share of
        entries that are not zero. Zero entries, of a transform that erases or clamps pixels, hardly
        vary: where there are many of them the variance tells their share more than anything else.

    Raises:
        ValueError: there are fewer than two draws.
    """
    if len(gradients) < 2:
        raise ValueError(f"the spread is one of two draws or more, got {len(gradients)}")
    signs = gradients.flatten(2).sign()
    mean = signs.mean(0)
    variance = (signs - mean).square().sum(0).mean(1) / (len(signs) - 1)
    cosine = torch.cosine_similarity(signs, mean.expand_as(signs), dim=2).mean(0)
    agreement = (signs == mean.sign()).to(signs).mean((0, 2))
    share = signs.abs().mean((0, 2))
    return variance, cosine, agreement, torch.where(share > 0, variance / share, 0.0)


class GradientSpread(Metric):
    """The means of `gradient_spread` over all images."""

    is_differentiable = False
    full_state_update = False
    totals: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("totals", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, gradients: Tensor) -> None:
        """Add a batch: gradients [n, B, …] of n >= 2 draws."""
        self.totals += torch.stack(gradient_spread(gradients)).double().sum(1)
        self.count += gradients.shape[1]

    def compute(self) -> dict[str, Tensor]:
        """The means, named variance, cosine, agreement and variance_of_nonzero."""
        means = (self.totals / self.count).float()
        names = ("variance", "cosine", "agreement", "variance_of_nonzero")
        return dict(zip(names, means, strict=True))
