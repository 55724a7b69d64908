"""Standard and adversarial training of one network, alone or behind random transforms."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

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
from lightning_rob.randomness import Generator, derive_seed
from lightning_rob.rules import expectation
from lightning_rob.runtime.errors import at_least

PERTURBABLE = ("32-true", "64-true", "bf16-mixed")  # weights of 16 bits round small changes away


class AdversarialTraining(RobustModule):
    """Train on adversarial images of the network (Madry et al. 2018), or by TRADES or MART.

    With `defense: RandomTransforms` this is the training of RT and, with an attack, of AdvRT
    (Sitawarin et al. 2022).

    Args:
        net: builds the network, [B, C, H, W] -> [B, K].
        attack: makes the adversarial images; None is standard training. Several, such as one for
            each norm, train within the union of their balls.
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
        union: what several attacks train on: "max", each image's adversarial image of the largest
            criterion, or "avg", all of them (Tramèr and Boneh 2019); or "random", those of one
            attack drawn for each batch, at the cost of one (E-AT, Croce and Hein 2022).
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack | Sequence[Attack] | None = None,
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
        union: Literal["max", "avg", "random"] = "max",
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {fraction}")
        if union not in ("max", "avg", "random"):
            raise ValueError(f"union must be 'max', 'avg' or 'random', got {union!r}")
        if awp is not None and not awp > 0:
            raise ValueError(f"awp must be a positive share such as 0.005, got {awp}")
        at_least(1, draws=draws)
        self.net = (net(),)  # a tuple: a second submodule would save the weights twice
        self.defense = defense(self.net[0])
        fits = attack is not None and fraction == 1 and isinstance(self.defense, Single)
        # Without a random start the divergence has no gradient: the image is its own target.
        climbs = is_pgd(attack) and attack.random_start
        given = f"got {attack}, fraction {fraction} and {type(self.defense).__name__}"
        if trades_beta is not None and not (fits and climbs and mart_beta is None):
            raise ValueError(
                "TRADES needs a PGD attack with random_start, fraction 1, a single network and no "
                f"mart_beta, {given}"
            )
        if mart_beta is not None and not fits:
            raise ValueError(f"MART needs an attack, fraction 1 and a single network, {given}")
        self.attack = tuple(attack) if isinstance(attack, Sequence) else attack
        self.union, self.fraction = union, fraction
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
        x_adv = self._perturbed(x, y)
        if (copies := len(x_adv) // max(len(x), 1)) > 1:  # of "avg", one for each attack
            x, y = torch.cat([x] * copies), torch.cat([y] * copies)
        batch = (x, x_adv, y)
        if self.awp is None:
            return self._loss_on(*batch)
        return loss_at_perturbed_weights(self.defense, self._loss_on, batch, self.awp)

    def _perturbed(self, x: Tensor, y: Tensor) -> Tensor:
        if self.attack is None:
            return x
        count = round(self.fraction * len(x))
        noise = self.noise and self.noise[torch.arange(count)]
        if self.trades_beta is None:
            attacks = self.attack if isinstance(self.attack, tuple) else (self.attack,)
            if self.union == "random" and len(attacks) > 1:
                seed = derive_seed(self.seed, self.current_epoch, self.global_step)
                attacks = (random.Random(seed).choice(attacks),)
            made = [
                torch.cat([attack(self.defense, x[:count], y[:count], noise), x[count:]])
                for attack in attacks
            ]
            return torch.cat(made) if self.union == "avg" else self._worst_of(made, y)
        assert is_pgd(self.attack)
        with attacking(self.defense) as defense, torch.no_grad():
            # The attack leaves the clean prediction constant; the loss moves both.
            clean = _Divergence(self.defense, defense.logits(x)[0].softmax(-1))
        attack = replace(
            self.attack, objective=lambda logits, weights, _: expectation(weights, logits[..., 0])
        )
        return attack(clean, x, torch.zeros_like(y), noise)

    def _worst_of(self, made: list[Tensor], y: Tensor) -> Tensor:
        """Return each image [B, …] of the largest criterion."""
        if len(made) == 1:
            return made[0]
        values = []
        with attacking(self.defense) as defense, torch.no_grad():
            for x_adv in made:
                noise = self.noise and self.noise.fold_in(2)  # the same for all of them
                values.append(self.criterion(*defense.sample_logits(x_adv, noise, self.draws), y))
        strongest = torch.stack(values).argmax(0)
        return torch.stack(made)[strongest, torch.arange(len(y), device=y.device)]

    def _loss_on(self, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        if self.trades_beta is None and self.mart_beta is None:
            own_noise = self.noise and self.noise.fold_in(1)  # independent of the attack's draws
            if own_noise and len(own_noise) < len(y):
                own_noise = own_noise[torch.arange(len(y)) % len(own_noise)]
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
