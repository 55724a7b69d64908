"""How attackers of a defense that adapts may look at it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class TransferFromStatic(Attack):
    """A transfer attack: on the network as it was before any test image (Chen et al. 2022, "AA").

    Args:
        attack: what the static network is attacked by.
    """

    knowledge: ClassVar[str] = "the defense before it adapts"
    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        return self.attack(defense.base_model, x, y, generator)


@dataclass(frozen=True)
class ThroughAdaptation(Attack):
    """The attack sees the defense adapt anew to every image that it tries (DENT-AA).

    Its gradient is that of the adapted network, which itself is taken as given.

    Args:
        attack: what the adapting defense is attacked by.
    """

    batch_dependent: ClassVar[bool] = True
    knowledge: ClassVar[str] = f"{Attack.knowledge}, and sees it adapt to every image tried"
    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        return self.attack(_Adapting(defense), x, y, generator)


class _Adapting(Defense):
    """A defense that adapts to whatever it is asked."""

    def __init__(self, defense: Defense) -> None:
        super().__init__(torch.ones(1), defense.rule)
        self.defense = defense

    @property
    def transductive(self) -> bool:
        """It adapts to every batch that it is asked."""
        return True

    @property
    def foldable_networks(self) -> list[nn.Module]:
        """None that an attack may fold."""
        raise TypeError("an adapting defense copies its network: it has to stay as it is")

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        """[B, C, H, W] -> [S, B, K], of the defense that has adapted to these images."""
        final = self.defense.adapt(x, generator)
        final.eval()
        return final.logits(x, generator)
