"""Standard and adversarial training of one network."""

from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import kl_div

from lightning_rob.attacks import PGD, Attack, attacking
from lightning_rob.defenses import Single
from lightning_rob.modules.robust_module import RobustModule
from lightning_rob.objectives import classification_loss
from lightning_rob.rules import expectation


class AdversarialTraining(RobustModule):
    """Train on adversarial images of the network as it is (Madry et al. 2018), or by TRADES.

    Args:
        net: makes the network, [B, C, H, W] -> [B, K].
        attack: makes the images; None is standard training.
        fraction: share of each batch that is attacked, its first images; the others stay clean.
        trades_beta: weight of the TRADES term (Zhang et al. 2019, eq. 5); None trains by
            cross-entropy. With it the attack, a PGD with random start, climbs the divergence.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.

    Raises:
        ValueError: a fraction outside (0, 1], or TRADES with an attack it cannot use.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack | None = None,
        fraction: float = 1.0,
        trades_beta: float | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        if trades_beta is not None and (fraction != 1 or not _can_start_trades(attack)):
            raise ValueError(
                "TRADES needs a PGD attack with random_start and fraction 1, "
                f"got {attack} and fraction {fraction}"
            )
        self.defense = Single(net())
        self.attack = attack
        self.fraction = fraction
        self.trades_beta = trades_beta

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy on the batch, partly attacked, or the TRADES loss."""
        if self.trades_beta is not None:
            return self._trades(x, y, self.trades_beta)
        if self.attack is not None:
            count = round(self.fraction * len(x))
            noise = self.noise and self.noise[torch.arange(count)]
            x = torch.cat([self.attack(self.defense, x[:count], y[:count], noise), x[count:]])
        return classification_loss(self.defense.logits(x)[0], y)

    def _trades(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        assert isinstance(self.attack, PGD)
        with attacking(self.defense), torch.no_grad():
            target = self.defense.logits(x)[0].softmax(-1)
        x_adv = replace(self.attack, objective=divergence_from(target))(
            self.defense, x, y, self.noise
        )
        clean = self.defense.logits(x)[0]
        log_probs = self.defense.logits(x_adv)[0].log_softmax(-1)
        divergence = kl_div(log_probs, clean.softmax(-1), reduction="batchmean")
        return classification_loss(clean, y) + beta * divergence


def _can_start_trades(attack: Attack | None) -> bool:
    """At the image itself the divergence has no gradient: a random start must leave it."""
    return isinstance(attack, PGD) and attack.random_start


def divergence_from(clean: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The objective KL(clean || now) of TRADES, averaged over draws.

    Args:
        clean: [B, K] probabilities on the clean images.
    """

    def objective(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        gap = clean.clamp_min(1e-30).log() - logits.log_softmax(-1)
        return expectation(weights, (clean * gap).sum(-1))

    return objective
