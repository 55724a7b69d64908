"""Standard and adversarial training of one network, alone or behind random transforms."""

from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import kl_div

from lightning_rob.attacks import Attack, attacking
from lightning_rob.attacks.pgd import is_pgd
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
    """Train on adversarial images of the current network (Madry et al. 2018), or by TRADES.

    With `defense: RandomTransforms` this is the training of RT and, with an attack, of AdvRT
    (Sitawarin et al. 2022).

    Args:
        net: builds the network, [B, C, H, W] -> [B, K].
        attack: makes the adversarial images; None is standard training.
        fraction: share of each batch that is attacked, its first images; the others stay clean.
        trades_beta: weight of the TRADES term (Zhang et al. 2019, eq. 5), whose attack, a PGD with
            random start, maximises the divergence; None trains by cross-entropy.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule, stepped once an epoch.
        defense: network -> defense that is trained and attacked.
        draws: number of draws of a random defense per image in the loss; None takes as many as
            for a prediction.
        criterion: loss of an image's draws; RT uses `ce_of_mean_probs`.
        weights: checkpoint with the network's initial weights, of any layout, see
            `lightning_rob.nets.load_weights`.

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
        if trades_beta is not None and (fraction != 1 or not _can_attack_for_trades(attack)):
            raise ValueError(
                "TRADES needs a PGD attack with random_start and fraction 1, "
                f"got {attack} and fraction {fraction}"
            )
        self.net = (net(),)  # a tuple: a second submodule would save the weights twice
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
        """Load the initial weights; a resumed run overwrites them with its own."""
        if stage == "fit" and self.weights is not None:
            load_weights(self.net[0], self.weights)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy on the batch, `fraction` of it attacked, or the TRADES loss."""
        if self.trades_beta is not None:
            x_adv = self._divergence_attack(x)(self.defense, x, y, self.noise)
            return self._trades_loss(x, x_adv, y, self.trades_beta)
        if self.attack is not None:
            count = round(self.fraction * len(x))
            noise = self.noise and self.noise[torch.arange(count)]
            x = torch.cat([self.attack(self.defense, x[:count], y[:count], noise), x[count:]])
        own_noise = self.noise and self.noise.fold_in(1)  # independent of the attack's draws
        logits, weights = self.defense.sample_logits(x, own_noise, self.draws)
        check_labels(y, logits.shape[-1])
        return self.criterion(logits, weights, y).mean()

    def _divergence_attack(self, x: Tensor) -> Attack:
        """Return the attack with the divergence from the predictions on clean images to climb."""
        assert is_pgd(self.attack)
        with attacking(self.defense), torch.no_grad():
            clean_probs = self.defense.logits(x)[0].softmax(-1)
        return replace(self.attack, objective=divergence_from(clean_probs))

    def _trades_loss(self, x: Tensor, x_adv: Tensor, y: Tensor, beta: float) -> Tensor:
        clean = self.defense.logits(x)[0]
        log_probs = self.defense.logits(x_adv)[0].log_softmax(-1)
        divergence = kl_div(log_probs, clean.softmax(-1), reduction="batchmean")
        return classification_loss(clean, y) + beta * divergence


def _can_attack_for_trades(attack: Attack | None) -> bool:
    """Return whether PGD starts off the image, where the divergence has no gradient."""
    return is_pgd(attack) and attack.random_start


def divergence_from(clean: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the objective KL(clean || perturbed) of TRADES, averaged over draws.

    Args:
        clean: [B, K] probabilities on the clean images.

    Returns:
        (logits [S, B, K], weights [S], labels [B]) -> [B].
    """

    def objective(logits: Tensor, weights: Tensor, y: Tensor) -> Tensor:
        gap = clean.clamp_min(1e-30).log() - logits.log_softmax(-1)
        return expectation(weights, (clean * gap).sum(-1))

    return objective
