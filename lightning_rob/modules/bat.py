"""Ensembles whose members are trained one after another: BAT, BARRE and IAT."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_rob.attacks import Attack, LatticeClimber
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense, Ensemble, Single
from lightning_rob.defenses.ensemble import sampling_probabilities
from lightning_rob.defenses.network import network_logits
from lightning_rob.evaluation.sampling import optimal_sampling
from lightning_rob.modules.base import RobustModule
from lightning_rob.modules.joint import new_members
from lightning_rob.objectives import classification_loss
from lightning_rob.runtime.errors import at_least


class SequentialTraining(RobustModule):
    """Train M members in one `fit`, one after another, each with its own optimizer and schedule.

    `defense` is the ensemble of the members whose training has started: each epoch evaluates the
    current ensemble. Each member keeps the weights of its best epoch by `monitor`, which prevents
    robust overfitting (Rice et al. 2020).

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        attack: makes the adversarial images.
        epochs: number of training epochs, the same for all members or one per member; a member with
            0 keeps the weights of its checkpoint. `trainer.max_epochs` must be the sum.
        members: number of networks M.
        probs: M sampling probabilities; None means equal ones. An ensemble of fewer than M members
            takes theirs, scaled to sum to one.
        monitor: logged value that selects a member's best epoch, larger is better; None keeps the
            last weights.
        checkpoints: weights that members start from, one path or null per member.
        **options: arguments of `RobustModule`; optimizer and schedule restart for each member.
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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.epochs = [epochs] * members if isinstance(epochs, int) else list(epochs)
        if len(self.epochs) != members or min(self.epochs, default=0) < 0 or sum(self.epochs) < 1:
            raise ValueError(f"epochs must be a count for each of {members} members, got {epochs}")
        self.probs = sampling_probabilities(probs, members)
        self.members = new_members(net, members, checkpoints)
        last = max(i for i, count in enumerate(self.epochs) if count)
        first = next(i for i, count in enumerate(self.epochs) if count)
        if not self.probs[: first + 1].sum() > 0:
            raise ValueError(f"the members that training begins with have no probability: {probs}")
        loaded = checkpoints or [None] * members
        if random := [i for i in range(last) if not (self.epochs[i] or loaded[i])]:
            raise ValueError(
                f"members {random} (counted from 0) have 0 epochs and no checkpoint: "
                "they would keep random weights"
            )
        self.attack, self.checkpoints = attack, loaded
        self.monitor = monitor
        self.best: dict[str, Any] = {"value": None, "weights": {}}
        self.stage = self._stage_at(0)

    @abstractmethod
    def attack_target(self) -> Defense:
        """Build the defense whose adversarial images train the current member."""

    @property
    def defense(self) -> Defense:  # type: ignore[override]
        return self.first_members(self.stage + 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x_adv = self.attack(self.attack_target(), x, y, self.noise)
        return classification_loss(network_logits(self.trainable_network(), x_adv), y)

    def trainable_network(self) -> nn.Module:
        return self.members[self.stage]

    def epochs_of_optimizer(self) -> float:
        return max(self.epochs)

    def first_members(self, count: int) -> Ensemble:
        """Build the ensemble of the first members, their probabilities scaled to sum to one."""
        probs = self.probs[:count]
        with torch.inference_mode(False):  # a test may ask first; attacks need gradients later
            return Ensemble(self.members[:count], probs / probs.sum()).to(self.device)

    def _stage_at(self, epoch: int) -> int:
        """Return the index of the member that an epoch trains; after the last epoch, the last."""
        ends = torch.tensor(self.epochs).cumsum(0)
        return min(int((ends <= epoch).sum()), len(self.epochs) - 1)

    @property
    def keeps_best(self) -> bool:
        return self.monitor is not None

    def check_trainer(self, trainer: Trainer) -> None:
        total, wanted = sum(self.epochs), trainer.max_epochs
        if wanted != total and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise MisconfigurationException(
                f"trainer.max_epochs must be {total}, the sum of model.epochs {self.epochs}, "
                f"got {wanted}"
            )

    def on_train_epoch_start(self) -> None:
        stage = self._stage_at(self.current_epoch)
        if stage != self.stage:  # a resumed run is there already
            self._finish_member()
            self.stage, self.best = stage, {"value": None, "weights": {}}
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_robust_evaluation(self, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.monitor or "")
        if self.trainer.state.fn != "fit" or value is None:
            return
        if self.best["value"] is None or value > self.best["value"]:
            state = self.trainable_network().state_dict()
            weights = {key: value.detach().cpu().clone() for key, value in state.items()}
            self.best = {"value": value, "weights": weights, "epoch": self.current_epoch}

    def on_train_epoch_end(self) -> None:
        # Before a checkpoint is written, which then holds the best weights.
        if self.current_epoch + 1 in torch.tensor(self.epochs).cumsum(0):
            self._finish_member()

    def _finish_member(self) -> None:
        if self.monitor is None or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.best["value"] is None:
            raise MisconfigurationException(
                f"no evaluation logged {self.monitor!r} for member {self.stage + 1}: add a "
                "callback such as callbacks/pgd.yaml, or set model.monitor to null"
            )
        self.trainable_network().load_state_dict(self.best["weights"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["staged"] = {"stage": self.stage, "best": self.best}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = self.saved_state(checkpoint, "staged")
        self.stage, self.best = state["stage"], state["best"]


class BAT(SequentialTraining):
    """Boosted adversarial training (Pinot et al. 2020; ARC paper, appendix B.1).

    Member k is trained on adversarial images of the mixture of the members before it, which it
    complements. The first member is trained on its own, as in adversarial training.
    """

    def attack_target(self) -> Defense:
        return self.first_members(max(self.stage, 1))


class IAT(SequentialTraining):
    """Independent adversarial training: each member is trained on its own adversarial images."""

    def attack_target(self) -> Defense:
        return Single(self.trainable_network()).to(self.device)


class BARRE(SequentialTraining):
    """Boosting for robust randomized ensembles (Dbouk and Shanbhag, ICML 2023).

    Each member starts from the weights of the one before, and is trained on adversarial images of
    the ensemble that it joins. The members are equally probable, until a search finds better
    probabilities: from half of a member's epochs on, and after its last one.

    Args:
        net: builds a network, [B, C, H, W] -> [B, K]; called once per member.
        attack: makes the adversarial images; the paper's is PGD on `ce_of_mean_probs`.
        epochs: number of training epochs, the same for all members or one per member.
        search: attack under which `optimal_sampling` compares probabilities; None is
            `LatticeClimber` of ten steps within the threat of training.
        search_from: number of members from which on there is a search; the authors' code has 4.
        search_every: epochs between two searches.
        search_images: number of training images, not augmented, that a search attacks.
        **options: arguments of `SequentialTraining`, without `probs`.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        attack: Attack,
        epochs: int | list[int],
        search: Attack | None = None,
        search_from: int = 4,
        search_every: int = 10,
        search_images: int = 2048,
        **options: Any,
    ) -> None:
        at_least(1, search_every=search_every, search_images=search_images, search_from=search_from)
        super().__init__(net, attack, epochs, **options)
        if self.stage:  # the members before it keep the weights of their checkpoints
            self._start_from_the_one_before()
        self.search = search or LatticeClimber(attack.threat, 10)
        self.search_from = search_from
        self.search_every, self.search_images = search_every, search_images

    def attack_target(self) -> Defense:
        return self.first_members(self.stage + 1)

    def check_trainer(self, trainer: Trainer) -> None:
        super().check_trainer(trainer)
        pairs = zip(self.checkpoints[1:], self.epochs[1:], strict=True)
        if unread := [path for path, count in pairs if path and count]:
            raise MisconfigurationException(
                f"BARRE trains a member from the weights of the one before: leave out {unread}"
            )

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.search_from <= len(self.members) and labelled_images(self.trainer) is None:
            raise MisconfigurationException(
                "BARRE attacks training images to find its probabilities: use a data module of "
                "lightning_rob.data, or set model.search_from above the number of members"
            )

    def on_train_epoch_start(self) -> None:
        before = self.stage
        super().on_train_epoch_start()
        if self.stage != before:
            self._start_from_the_one_before()
            self.probs = sampling_probabilities(None, len(self.members))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()  # a member's best weights first
        epochs, members = self.epochs[self.stage], self.stage + 1
        done = self.current_epoch + 1 - sum(self.epochs[: self.stage])
        late = done - epochs // 2
        due = done == epochs or (late > 0 and late % self.search_every == 0)
        if not due or members < self.search_from:
            return
        data = labelled_images(self.trainer)
        assert data is not None
        found = optimal_sampling(
            self.first_members(members),
            self.search,
            DataLoader(data, batch_size=128),
            seed=self.seed,
            max_images=self.search_images,
        )
        share = members / len(self.members)  # of the members that are there
        probs = torch.cat([found.probs.float() * share, self.probs[members:]])
        # Each process has searched, with BatchNorm statistics of its own.
        self.probs = self.trainer.strategy.broadcast(probs)

    def _start_from_the_one_before(self) -> None:
        self.members[self.stage].load_state_dict(self.members[self.stage - 1].state_dict())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["staged"]["probs"] = self.probs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.probs = self.saved_state(checkpoint, "staged")["probs"]
