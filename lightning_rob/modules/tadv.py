"""The training that TADV repeats in private, as a fit."""

from collections.abc import Callable
from typing import final

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.attacks import Attack
from lightning_rob.defenses import Single
from lightning_rob.defenses.tadv import check_fraction, half_adversarial
from lightning_rob.modules.base import RobustModule


@final
class TADV(RobustModule):
    """Train on batches half clean, half adversarial, as each network of TADV (Chen et al. 2022).

    It fits one network, TADV's static model, with the loss of `lightning_rob.defenses.TADV`, which
    repeats it for each test batch. `AdversarialTraining(fraction=0.5)` minimises the same but for
    which images of a batch are attacked and, of an odd number, how the parts are weighted.

    Args:
        net: makes the network, [B, C, H, W] -> [B, K].
        attack: makes the adversarial images.
        fraction: share of each batch that is attacked, its last images; also their weight.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.

    Raises:
        ValueError: a fraction outside (0, 1].
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack,
        fraction: float = 0.5,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        check_fraction(fraction)
        self.defense = Single(net())
        self.attack = attack
        self.fraction = fraction

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of `half_adversarial`."""
        return half_adversarial(self.defense, x, y, self.attack, self.fraction, self.noise)
