"""Ensembles whose members are trained one after another."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.attacks import Attack
from lightning_rob.defenses import Defense, Ensemble, Single
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.modules.base import RobustModule
from lightning_rob.modules.joint import new_members
from lightning_rob.objectives import classification_loss


class SequentialTraining(RobustModule):
    """One `fit` trains M members in turn, each with an optimizer and schedule of its own.

    `defense` is the ensemble of the members begun so far, so every epoch's evaluation is of what
    stands by then. Each member keeps the weights of its best epoch by `monitor`, a defence
    against robust over-fitting (Rice et al. 2020).

    Args:
        net: makes a network, [B, C, H, W] -> [B, K]; called once per member.
        attack: makes the adversarial images.
        epochs: how many epochs each member is trained: one number, or one per member; 0 leaves a
            member as its checkpoint has it. `trainer.max_epochs` must be their sum.
        members: M, how many networks.
        probs: M sampling probabilities; None means equal ones. While fewer than M stand, theirs
            are scaled to sum to one.
        monitor: the logged value by which a member's best epoch is chosen, larger being better;
            None keeps the last weights.
        checkpoints: weights that members start from, one path or null per member.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch, anew for each member.

    Raises:
        ValueError: numbers that do not fit together.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack,
        epochs: int | list[int],
        members: int = 2,
        probs: list[float] | None = None,
        monitor: str | None = "val/robust/worst",
        checkpoints: list[str | None] | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.epochs = _per_member(epochs, members)
        self.probs = sampling_probabilities(probs, members)
        self.members = new_members(net, members, checkpoints)
        self.attack = attack
        self.monitor = monitor
        self.best: dict[str, Any] = {"value": None, "weights": {}}
        self.stage = self._stage_at(0)

    @abstractmethod
    def attack_target(self) -> Defense:
        """Whose adversarial images the member in training sees."""

    @property
    def defense(self) -> Defense:  # type: ignore[override]
        """The ensemble of the members begun so far."""
        begun = self.members[: self.stage + 1]
        probs = self.probs[: self.stage + 1]
        return Ensemble(begun, probs / probs.sum()).to(self.device)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of the member in training on the opponent's adversarial images."""
        x_adv = self.attack(self.attack_target(), x, y, self.noise)
        return classification_loss(self.trained()(x_adv), y)

    def trained(self) -> nn.Module:
        """The member in training."""
        return self.members[self.stage]

    def _stage_at(self, epoch: int) -> int:
        """Which member an epoch trains; the last one after the last epoch."""
        ends = torch.tensor(self.epochs).cumsum(0)
        return min(int((ends <= epoch).sum()), len(self.epochs) - 1)

    def on_fit_start(self) -> None:
        """Check that the trainer's epochs are the members'."""
        total, wanted = sum(self.epochs), self.trainer.max_epochs
        if wanted != total and not _is_trial(self.trainer):
            raise MisconfigurationException(
                f"trainer.max_epochs must be {total}, the sum of model.epochs {self.epochs}, "
                f"got {wanted}"
            )

    def on_train_epoch_start(self) -> None:
        """Go on to the next member when its turn has come."""
        stage = self._stage_at(self.current_epoch)
        if stage != self.stage:
            self._finish_member()
            self.stage, self.best = stage, {"value": None, "weights": {}}
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_robust_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Keep the member's weights if they are its best ones."""
        value = metrics.get(self.monitor or "")
        if self.trainer.state.fn != "fit" or value is None:
            return
        if self.best["value"] is None or value > self.best["value"]:
            weights = {k: v.detach().cpu().clone() for k, v in self.trained().state_dict().items()}
            self.best = {"value": value, "weights": weights, "epoch": self.current_epoch}

    def on_train_epoch_end(self) -> None:
        """After a member's last epoch, before a checkpoint is written, restore its best weights."""
        if self.current_epoch + 1 in torch.tensor(self.epochs).cumsum(0):
            self._finish_member()

    def _finish_member(self) -> None:
        if self.monitor is None or _is_trial(self.trainer):
            return
        if self.best["value"] is None:
            raise MisconfigurationException(
                f"no evaluation logged {self.monitor!r} for member {self.stage + 1}: add a "
                "callback such as callbacks/pgd.yaml, or set model.monitor to null"
            )
        self.trained().load_state_dict(self.best["weights"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store which member is in training, and its best weights."""
        checkpoint["staged"] = {"stage": self.stage, "best": self.best}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` stored, before the optimizer is made."""
        kept = self.kept_in(checkpoint, "staged")
        self.stage, self.best = kept["stage"], kept["best"]


def _is_trial(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def _per_member(epochs: int | Sequence[int], members: int) -> list[int]:
    counts = [epochs] * members if isinstance(epochs, int) else list(epochs)
    if len(counts) != members or min(counts, default=0) < 0 or sum(counts) < 1:
        raise ValueError(f"epochs must be a count for each of {members} members, got {epochs}")
    return counts


class BAT(SequentialTraining):
    """Boosted adversarial training (Pinot et al. 2020; ARC paper, appendix B.1).

    Member k is trained on adversarial images of the mixture of the members before it, which it
    is there to complement; the first on its own, as in adversarial training.
    """

    def attack_target(self) -> Defense:
        """The members before, or the first member itself."""
        count = max(self.stage, 1)
        probs = self.probs[:count]
        return Ensemble(self.members[:count], probs / probs.sum()).to(self.device)


class IAT(SequentialTraining):
    """Independent adversarial training: M members, each on its own adversarial images."""

    def attack_target(self) -> Defense:
        """The member in training."""
        return Single(self.trained()).to(self.device)
