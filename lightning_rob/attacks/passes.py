"""The passes that an attack costs: what they depend on besides its own arguments."""

from functools import cache

import torch
from torch import Tensor

from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to


class PassCount:
    """Numbers of networks and of classes, on which the passes of an attack depend.

    A pass is one forward or one backward pass of one image through one network: a step of PGD on
    an ensemble of M members costs 2 M, one of EoT on S draws 2 S.

    Args:
        defense: the defense under attack.
        x: [B, C, H, W] the images.
        classes: number of classes; None predicts the first image to find out.
    """

    def __init__(self, defense: Defense, x: Tensor, classes: int | None = None) -> None:
        self.defense = defense
        self.x = x
        self.asked = 0  # passes of the first image before the attack
        self._classes = classes
        self._logits = cache(self._ask)

    @property
    def networks(self) -> int:
        """Networks that the defense runs for a prediction: its members, or its draws."""
        return len(self.defense.weights)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self._classes or self._logits(None).shape[-1]

    def drawn(self, draws: int | None) -> int:
        """Return the networks that run for one image where a random defense is drawn so often."""
        if draws is None or type(self.defense).sample_logits is Defense.sample_logits:
            return self.networks * (draws or 1)
        return self._logits(draws).shape[0]

    @torch.no_grad()
    def _ask(self, draws: int | None) -> Tensor:
        generator = torch.Generator(self.x.device).manual_seed(0)
        first = torch.zeros(1, dtype=torch.long, device=self.x.device)
        with restricted_to(self.defense, first):
            logits, _ = self.defense.sample_logits(self.x[:1], generator, draws)
        self.asked += len(logits)
        return logits
