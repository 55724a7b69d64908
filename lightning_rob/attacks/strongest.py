"""Several attacks as one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rob.attacks.base import Attack
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, Streams
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class Strongest(Attack):
    """Per image, whichever of several attacks leaves the defense right least often.

    Attacks run in turn, each only on images that may still be answered rightly; the earlier one
    wins ties. On a random defense one draw decides, so the choice is itself a noisy one.

    Args:
        attacks: at least one, all of the same threat.

    Raises:
        ValueError: no attack, or different threats.
        TypeError: when called on a defense that adapts to the whole batch.
    """

    attacks: tuple[Attack, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "attacks", tuple(self.attacks))
        threats = {attack.threat for attack in self.attacks}
        if len(threats) != 1:
            raise ValueError(f"attacks must share one threat, got {sorted(map(str, threats))}")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The threat they share."""
        return self.attacks[0].threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        if defense.transductive:
            raise TypeError(
                f"{type(defense).__name__} adapts to whole batches: Strongest cannot pick image by "
                "image; let RobustEval play the attacks one by one"
            )
        best, lowest = x.clone(), x.new_full((len(x),), torch.inf)
        for turn, attack in enumerate(self.attacks):
            live = (lowest > 0).nonzero()[:, 0]
            if not len(live):
                break
            part = generator
            if isinstance(generator, Streams):
                part = generator[live].fold_in(turn) if turn else generator[live]
            x_adv = attack.perturb(defense, x[live], y[live], part)
            with torch.no_grad():
                right = defense(x_adv, part).gather(1, y[live, None])[:, 0].to(lowest)
            wins = right < lowest[live]
            best[live[wins]], lowest[live[wins]] = x_adv[wins], right[wins]
        return best
