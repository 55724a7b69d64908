"""Attacks of other packages on a defense."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.sight import hooked
from lightning_rob.defenses import Defense
from lightning_rob.objectives import log_mean_probs
from lightning_rob.randomness import Generator, seed_from, uniform
from lightning_rob.rules import Rule, expectation, mean_logits
from lightning_rob.runtime.errors import NoGradientError
from lightning_rob.threat import Norm, Threat, choose

TOLERANCE = 1e-4  # relative: rounding of a package that projects by another order of operations


@dataclass(frozen=True)
class Foreign(Attack):
    """An attack of foolbox, torchattacks, adv-lib or your own code, as one of this package.

    The attack gets a network [B, C, H, W] -> [B, K] in eval mode: the logits of a single network,
    the mean logits under the rule `mean_logits`, else the log of the mean probabilities. Noise from
    torch's global stream is drawn from a stream of the evaluation's own and leaves the global one
    as it was; an attack that draws for the whole batch gives other images in other batches.

      fmn = Foreign(Threat("l2", 0.5), partial(adv_lib.attacks.fmn, norm=2, steps=50), minimal=True)

    Args:
        threat: the ball and bounds, which are checked; the attack's own settings have to agree.
        run: function of a network, images [B, C, H, W] and labels [B] that returns images.
        minimal: whether it searches the smallest perturbation: images beyond the ball then count
            as failures and are returned unchanged; otherwise they are an error.
    """

    batch_dependent: ClassVar[bool] = True
    knowledge: ClassVar[str] = "what the attack of another package uses of the predictions"
    threat: Threat
    run: Callable[[nn.Module, Tensor, Tensor], Tensor]
    minimal: bool = False
    draws: int | None = None

    def rescaled(self, eps: float, norm: Norm | None = None) -> Attack:
        """Raise ValueError: the radius is inside `run` too."""
        raise ValueError(f"give a Foreign for each radius: {self.threat} is fixed in its run")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        drawn = uniform(torch.zeros(len(x), device=x.device), generator=generator)
        seed = seed_from(drawn)
        stream = torch.Generator(x.device).manual_seed(seed)
        with isolated_streams():
            torch.manual_seed(seed)
            found = self.run(ScoreNetwork(defense, stream, self.draws), x.clone(), y.clone())
        # Other packages may return arrays, or tensors of another type or device.
        found = torch.as_tensor(found).detach().to(x)
        if found.shape != x.shape or not found.isfinite().all():
            raise ValueError(
                f"the attack must return finite images {list(x.shape)}, got {list(found.shape)}"
            )
        low, high = self.threat.bounds
        if float(found.min()) < low - TOLERANCE or float(found.max()) > high + TOLERANCE:
            raise ValueError(
                f"the attack must return images in {list(self.threat.bounds)}, got values in "
                f"[{float(found.min()):.4g}, {float(found.max()):.4g}]"
            )
        size, allowed = self.threat.distance(found, x), self.threat.eps * (1 + TOLERANCE)
        beyond = size > allowed
        if beyond.any() and not self.minimal:
            raise ValueError(
                f"the attack left {self.threat}: largest perturbation {float(size.max()):.6g}; "
                "give it the same radius, or minimal=True if it searches the smallest one"
            )
        kept = choose(beyond, x, found)
        # Rounding errors; of other norms, within the tolerance, there is no projection.
        if self.threat.p not in (1, 2, math.inf):
            return self.threat.apply(kept - x, x)
        return self.threat.project(kept, x)


class ScoreNetwork(nn.Module):
    """A defense as a network that returns `scores`."""

    def __init__(self, defense: Defense, generator: Generator, draws: int | None = None) -> None:
        super().__init__()
        self.defense = defense
        self.generator = generator
        self.draws = draws
        super().train(False)

    def train(self, mode: bool = True) -> "ScoreNetwork":
        return self  # in eval mode: training mode would change the network's statistics

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            x = x.view_as(x)  # a tensor of this call, whose gradient is that of this call
            hooked(x, self.generator)
        return scores(self.defense, x, self.generator, self.draws).float()


def scores(defense: Defense, x: Tensor, generator: Generator, draws: int | None) -> Tensor:
    """Return a score [B, K] for each class, as the mean predicts it; see `scores_of`."""
    found = scores_of(*defense.sample_logits(x, generator, draws), defense.rule)
    if x.requires_grad and torch.is_grad_enabled() and not found.requires_grad:
        raise NoGradientError()
    return found


def scores_of(logits: Tensor, weights: Tensor, rule: Rule) -> Tensor:
    """Return a score [B, K] for each class, the largest for the class that the mean predicts."""
    logits = logits.float() if logits.itemsize < 4 else logits
    weights = weights.to(logits)
    # A single draw keeps its logits: the logarithm of its probabilities would only lose digits.
    if len(logits) == 1:
        return logits[0]
    if rule is mean_logits:
        return expectation(weights, logits)
    return log_mean_probs(logits, weights)


@contextmanager
def isolated_streams() -> Iterator[None]:
    """Restore torch's global random streams at the end of the block."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else []):
        yield
