"""Randomized smoothing (Cohen et al. 2019): the vote of a defense on Gaussian copies."""

from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lightning_rob.defenses.base import Defense, Single
from lightning_rob.objectives import log_mean_probs
from lightning_rob.randomness import Generator, Streams, uniform
from lightning_rob.rules import expectation, majority, mean_logits, mean_probs, random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.memory import images_at_once, is_whole

GRID = 2.0**-12  # on which noisy pixels lie: a sixteenth of a step of 8-bit images
CELL_ERROR = 2.0**-31  # probability that a pixel's sampled place on the grid is not the exact one
MOST_VALUES = 2**26  # pixels that are noisy at a time


def gaussian_copies(x: Tensor, sigma: float, generator: Generator = None) -> Tensor:
    """Add Gaussian noise to images [B, …] and round each pixel to a multiple of `GRID`.

    A network sees a function of the exact sum, except with a probability of at most
    `sampling_error`. The gradient is that of the sum.
    """
    # The last bits of an image plus float32 noise show which image it was, so that a network could
    # vote otherwise on each image, whatever a certificate says (Voráček and Hein, ICLR 2023). Here
    # noise is the normal quantile of 48 random bits, the sum is in double precision, and a network
    # sees only its place on the grid.
    high, low = (_precise(uniform(x.float(), *x.shape[1:], generator=generator)) for _ in range(2))
    # The middle of one of 2^48 intervals, so never 0 or 1.
    u = (high * 2**24).floor() * 2.0**-24 + (low * 2**24).floor() * 2.0**-48 + 2.0**-49
    # An attack that looks for what is rounded or detached should not find this.
    with torch._C.DisableTorchFunction():
        places = ((_precise(x.detach()) + sigma * torch.special.ndtri(u)) / GRID).round()
        noisy: Tensor = (places * GRID).to(x)
        return noisy + (x - x.detach()) if x.requires_grad else noisy


def sampling_error(x: Tensor, sigma: float) -> float:
    """Bound how far a probability under `gaussian_copies` is from that under exact noise."""
    # Of 16 sigma / GRID borders between places, each falls into one of the 2^48 intervals, and
    # within 2e-14 of it the rounding of the quantile may decide: 2^-31 for each pixel of an image
    # with sigma 1, a bound on the total variation.
    return x[0].numel() * CELL_ERROR * max(sigma, 1.0)


def _precise(x: Tensor) -> Tensor:
    return (x.cpu() if x.device.type == "mps" else x).double()  # which has no double precision


class Smoothing(Defense):
    """The majority vote of a network or a defense on copies of an image with Gaussian noise.

    Each copy has one vote, the prediction of the base on it: of a randomized ensemble that of a
    member which is drawn for the copy, of an ensemble with `mean_probs` or `mean_logits` that of
    the mean (Horváth et al. 2022). `lightning_rob.certify` bounds how far an image may be moved
    before the vote of infinitely many copies changes.

    Args:
        base: network [B, C, H, W] -> [B, K], which sees pixels beyond [0, 1], or a defense; where
            it rejects by a class, that class has votes too.
        sigma: standard deviation of the noise in pixel units.
        draws: copies of each image in a prediction; attacks and training may draw others.
        rejects: class by which a network rejects an image; a defense has its own.
    """

    resamples = True

    def __init__(
        self, base: nn.Module, sigma: float = 0.25, draws: int = 100, rejects: int | None = None
    ) -> None:
        if not 0 < sigma < torch.inf:
            raise ValueError(f"sigma must be a positive deviation in pixel units, got {sigma}")
        at_least(1, draws=draws)
        base = base if isinstance(base, Defense) else Single(base, rejects=rejects)
        name = type(base).__name__
        if base.transductive:
            raise TypeError(
                f"{name} adapts to the test batch: noisy copies of an image would be another "
                "batch, and a certificate is of one fixed classifier; smooth its network"
            )
        if base.abstains:
            raise ValueError(
                f"{name} rejects images by rows of zeros, for which no vote is counted: smooth one "
                "that rejects by a class (rejects=10)"
            )
        if is_smoothing(base):
            raise TypeError(f"{name} is smoothed already: smooth its base")
        super().__init__(torch.full((draws,), 1 / draws), majority, base.rejects)
        self.base, self.sigma, self.draws = base, sigma, draws

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return self.base.foldable_networks

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return self.sample_logits(x, generator)[0]

    def sample_logits(
        self, x: Tensor, generator: Generator = None, draws: int | None = None
    ) -> tuple[Tensor, Tensor]:
        draws = draws or self.draws
        # Each copy of an image has a stream of its own.
        generator = generator.split(draws) if isinstance(generator, Streams) else generator
        logits = self.copy_logits(x.repeat(draws, *[1] * (x.dim() - 1)), generator)
        return logits.view(draws, len(x), logits.shape[-1]), x.new_full((draws,), 1 / draws)

    def copy_logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """Compute logits [B, K] that decide the vote of one noisy copy of each image [B, …]."""
        # In training BatchNorm needs all copies at once; else memory and caches decide.
        noisy_at_once, at_once = MOST_VALUES // max(x[:1].numel(), 1), images_at_once(x)
        if self.training or is_whole():
            noisy_at_once = at_once = len(x)
        noisy_at_once, at_once = max(noisy_at_once, 1), max(at_once, 1)
        found = []
        for rows in torch.split(torch.arange(len(x), device=x.device), noisy_at_once):
            noise = generator[rows] if isinstance(generator, Streams) else generator
            noisy = gaussian_copies(x[rows], self.sigma, noise)
            for some in torch.split(torch.arange(len(rows), device=x.device), at_once):
                part = noise[some] if isinstance(noise, Streams) else noise
                found.append(_decided(self.base, noisy[some], part))
        return torch.cat(found)


def is_smoothing(defense: nn.Module) -> TypeGuard[Smoothing]:
    """Return whether a defense is a `Smoothing`, in a form that type checkers follow."""
    return isinstance(defense, Smoothing)


def _decided(base: Defense, x: Tensor, generator: Generator) -> Tensor:
    """Return logits [B, K] whose largest is the class that the base predicts."""
    parts = base.components()
    if len(parts) > 1 and base.rule is random_member:  # each part predicts by its own rule
        shares, defenses = zip(*parts, strict=True)
        logits = torch.stack([_decided(part, x, generator) for part in defenses])
        weights = logits.new_tensor(shares)
    else:
        logits, weights = base.logits(x, generator), base.weights
    if len(logits) == 1:
        return logits[0]
    if base.rule is random_member:
        u = uniform(x.detach().float(), generator=generator)
        member = torch.searchsorted(weights.to(u).cumsum(0), u, right=True)
        member = member.clamp_max(len(weights) - 1)[None, :, None]
        return logits.gather(0, member.expand(1, *logits.shape[1:]))[0]
    if base.rule is mean_logits:
        return expectation(weights, logits)
    pooled = log_mean_probs(logits, weights)
    if base.rule is mean_probs:
        return pooled
    # Of a vote within the copy: its class, with the gradient of the mean probabilities.
    voted = one_hot(base.rule(logits, weights).argmax(-1), logits.shape[-1]).to(pooled)
    return voted + (pooled - pooled.detach())
