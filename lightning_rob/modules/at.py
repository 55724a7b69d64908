"""Standard and adversarial training of one network, alone or behind random transforms."""

from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import kl_div

from lightning_rob.attacks import Attack, attacking
from lightning_rob.attacks.pgd import is_pgd
from lightning_rob.defenses import Defense, Single
from lightning_rob.defenses.per_image import PerImageValues
from lightning_rob.modules.base import RobustModule
from lightning_rob.modules.weight_perturbation import loss_at_perturbed_weights
from lightning_rob.nets import load_weights
from lightning_rob.objectives import (
    Loss,
    boosted_cross_entropy,
    check_labels,
    classification_loss,
    expected_ce,
)
from lightning_rob.randomness import Generator
from lightning_rob.rules import expectation
from lightning_rob.runtime.errors import at_least

PERTURBABLE = ("32-true", "64-true", "bf16-mixed")  # weights of 16 bits round small changes away


class AdversarialTraining(RobustModule):
    """Train on adversarial images of the network (Madry et al. 2018), or by TRADES or MART.

    With `defense: RandomTransforms` this is the training of RT and, with an attack, of AdvRT
    (Sitawarin et al. 2022).

    Args:
        net: builds the network, [B, C, H, W] -> [B, K].
        attack: makes the adversarial images; None is standard training.
        fraction: share of each batch that is attacked, its first images; the others stay clean.
        trades_beta: weight of the TRADES term (Zhang et al. 2019, eq. 5), whose attack, a PGD with
            random start, maximises the divergence; None trains by cross-entropy.
        defense: network -> defense that is trained and attacked.
        draws: number of draws of a random defense per image in the loss; None takes as many as
            for a prediction.
        criterion: loss of an image's draws; RT uses `ce_of_mean_probs`.
        weights: checkpoint with the network's initial weights, of any layout, see
            `lightning_rob.nets.load_weights`.
        mart_beta: weight of MART's divergence (Wang et al., ICLR 2020; lambda in the paper, which
            takes 5); its attack maximises the cross-entropy.
        awp: radius gamma of adversarial weight perturbation (Wu et al. 2020), with any of the
            losses, as a share of each layer's norm: 0.005 in the paper. It costs one more forward
            and backward pass per batch.
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
        criterion: Loss = expected_ce,
        weights: str | None = None,
        mart_beta: float | None = None,
        awp: float | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        given = f"got {attack} and fraction {fraction}"
        if trades_beta is not None and mart_beta is not None:
            raise ValueError(f"give trades_beta {trades_beta} or mart_beta {mart_beta}, not both")
        # Without a random start the divergence has no gradient: the image is its own target.
        climbs = is_pgd(attack) and attack.random_start
        if trades_beta is not None and (fraction != 1 or not climbs):
            raise ValueError(f"TRADES needs a PGD attack with random_start and fraction 1, {given}")
        if mart_beta is not None and (fraction != 1 or attack is None):
            raise ValueError(f"MART needs an attack and fraction 1, {given}")
        if awp is not None and not awp > 0:
            raise ValueError(f"awp must be a positive share such as 0.005, got {awp}")
        at_least(1, draws=draws)
        self.net = (net(),)  # a tuple: a second submodule would save the weights twice
        self.defense = defense(self.net[0])
        if (trades_beta, mart_beta) != (None, None) and not isinstance(self.defense, Single):
            name = "MART" if trades_beta is None else "TRADES"
            raise ValueError(f"{name} is for a single network, got {type(self.defense).__name__}")
        self.attack, self.fraction = attack, fraction
        self.trades_beta, self.mart_beta, self.awp = trades_beta, mart_beta, awp
        self.draws, self.criterion, self.weights = draws, criterion, weights

    @property
    def method(self) -> str:
        return super().method if self.attack else "Standard training"

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.weights is not None:  # a resumed run overwrites them
            load_weights(self.net[0], self.weights)

    def check_trainer(self, trainer: Trainer) -> None:
        if self.awp is not None and trainer.precision not in PERTURBABLE:
            raise MisconfigurationException(
                f"awp is for precision {', '.join(PERTURBABLE)}, got {trainer.precision}"
            )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        batch = (x, self._perturbed(x, y), y)
        if self.awp is None:
            return self._loss_on(*batch)
        return loss_at_perturbed_weights(self.defense, self._loss_on, batch, self.awp)

    def _perturbed(self, x: Tensor, y: Tensor) -> Tensor:
        if self.attack is None:
            return x
        count = round(self.fraction * len(x))
        noise = self.noise and self.noise[torch.arange(count)]
        if self.trades_beta is None:
            return torch.cat([self.attack(self.defense, x[:count], y[:count], noise), x[count:]])
        assert is_pgd(self.attack)
        with attacking(self.defense) as defense, torch.no_grad():
            # The attack leaves the clean prediction constant; the loss moves both.
            clean = _Divergence(self.defense, defense.logits(x)[0].softmax(-1))
        attack = replace(
            self.attack, objective=lambda logits, weights, _: expectation(weights, logits[..., 0])
        )
        return attack(clean, x, torch.zeros_like(y), noise)

    def _loss_on(self, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        if self.trades_beta is None and self.mart_beta is None:
            own_noise = self.noise and self.noise.fold_in(1)  # independent of the attack's draws
            logits, weights = self.defense.sample_logits(x_adv, own_noise, self.draws)
            check_labels(y, logits.shape[-1])
            return self.criterion(logits, weights, y).mean()
        clean, adversarial = (self.defense.logits(images)[0] for images in (x, x_adv))
        check_labels(y, clean.shape[-1])
        probs, log_probs = clean.softmax(-1), adversarial.log_softmax(-1)
        if self.trades_beta is not None:
            divergence = kl_div(log_probs, probs, reduction="batchmean")
            return classification_loss(clean, y) + self.trades_beta * divergence
        assert self.mart_beta is not None
        divergence = kl_div(log_probs, probs, reduction="none").sum(-1)
        # MART weighs an image by how wrong its clean prediction is.
        misclassified = 1 - probs.gather(1, y[:, None])[:, 0]
        boosted = boosted_cross_entropy(adversarial, y)
        return (boosted + self.mart_beta * misclassified * divergence).mean()


class _Divergence(Defense):
    """Defense whose "logits" are KL(clean || perturbed) of TRADES, for PGD to raise."""

    def __init__(self, defense: Defense, clean: Tensor) -> None:
        super().__init__(defense.weights, defense.rule)
        self.defense, self.clean = defense, PerImageValues(clean)

    @property
    def foldable_networks(self) -> list[nn.Module]:
        return self.defense.foldable_networks

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        clean: Tensor = self.clean()
        logits = self.defense.logits(x, generator)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # 0 log 0 is 0: without the minimum it would be no number.
        gap = clean.clamp_min(1e-30).log() - precise.log_softmax(-1)
        return (clean * gap).sum(-1, keepdim=True)
