"""Standard and adversarial training of one network, alone or behind random transforms."""

from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import kl_div

from lightning_rob.attacks import PGD, Attack, attacking
from lightning_rob.defenses import Defense, Single
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights
from lightning_rob.objectives import (
    Objective,
    check_labels,
    classification_loss,
    expected_ce,
)
from lightning_rob.rules import expectation


class AdversarialTraining(RobustModule):
    """Train on adversarial images of the network as it is (Madry et al. 2018), or by TRADES.

    With `RandomTransforms` for a defense it is the training of RT and, with an attack, of AdvRT
    (Sitawarin et al. 2022).

    Args:
        net: makes the network, [B, C, H, W] -> [B, K].
        attack: makes the images; None is standard training.
        fraction: share of each batch that is attacked, its first images; the others stay clean.
        trades_beta: weight of the TRADES term (Zhang et al. 2019, eq. 5); None trains by
            cross-entropy. With it the attack, a PGD with random start, climbs the divergence.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.
        defense: makes the defense that is trained and attacked of the network.
        draws: how often a random defense is drawn for the loss of an image; None for as often as
            it is for an answer.
        criterion: the loss of an image's draws; RT's is `ce_of_mean_probs`.
        weights: checkpoint from which the network takes its weights before training begins, of any
            layout, see `lightning_rob.nets.load_weights`.

    Raises:
        ValueError: a fraction outside (0, 1], or TRADES with an attack or defense it cannot use.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack | None = None,
        fraction: float = 1.0,
        trades_beta: float | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        defense: Callable[[nn.Module], Defense] = Single,
        draws: int | None = None,
        criterion: Objective = expected_ce,
        weights: str | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        if trades_beta is not None and (fraction != 1 or not _can_start_trades(attack)):
            raise ValueError(
                "TRADES needs a PGD attack with random_start and fraction 1, "
                f"got {attack} and fraction {fraction}"
            )
        self.net = (net(),)  # in a tuple, lest its weights be listed twice
        self.defense = defense(self.net[0])
        if trades_beta is not None and self.defense.kind != "single":
            raise ValueError(f"TRADES is for a single network, got {type(self.defense).__name__}")
        if draws is not None and draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws}")
        self.attack = attack
        self.fraction = fraction
        self.trades_beta = trades_beta
        self.draws = draws
        self.criterion = criterion
        self.weights = weights

    def setup(self, stage: str) -> None:
        """Take the weights to begin with; a resumed training has its own."""
        if stage == "fit" and self.weights is not None:
            load_weights(self.net[0], self.weights)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy on the batch, partly attacked, or the TRADES loss."""
        if self.trades_beta is not None:
            return self._trades(x, y, self.trades_beta)
        if self.attack is not None:
            count = round(self.fraction * len(x))
            noise = self.noise and self.noise[torch.arange(count)]
            x = torch.cat([self.attack(self.defense, x[:count], y[:count], noise), x[count:]])
        private = self.noise and self.noise.fold_in(1)  # not what the attack has drawn from
        logits, weights = self.defense.sample_logits(x, private, self.draws)
        check_labels(y, logits.shape[-1])
        return self.criterion(logits, weights, y).mean()

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
