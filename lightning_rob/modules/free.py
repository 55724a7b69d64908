"""Adversarial training for free."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.defenses import Single
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights
from lightning_rob.objectives import classification_loss
from lightning_rob.threat import Threat


class FreeTraining(RobustModule):
    """Adversarial training at the cost of standard training (Shafahi et al. 2019, Algorithm 1).

    Each batch is replayed m times. One backward pass gives the gradient by the weights, with which
    the optimizer steps, and the gradient by the perturbation, which goes up by a step of length eps
    and is brought back into the ball. The perturbation is carried over to the next replay and to
    the next batch, place by place.

    An epoch costs m times as much: like the paper, divide the epochs of standard training by m, and
    the milestones of its schedule. `trainer.global_step` counts batches, not replays. A checkpoint
    holds the perturbation, so that a run of one process resumes exactly; of several processes all
    resume with that of the first.

    Args:
        net: makes the network, [B, C, H, W] -> [B, K].
        threat: the ball; linf in the paper, or l2.
        replays: m; the paper uses 8 for CIFAR-10 and 4 for ImageNet.
        optimizer: parameters -> optimizer.
        lr_scheduler: optimizer -> schedule by epoch.
        attack_target: checkpoint of a trained network of the same kind, to train on its adversarial
            images, as the second member of BAT is (ARC paper, appendix B.1): the perturbation goes
            up by its gradient, at the cost of one more forward and backward pass a replay.

    Raises:
        ValueError: no replays, or a relative threat.
        FileNotFoundError: when a fit starts, there is no such checkpoint.
    """

    def __init__(
        self,
        net: Callable[[], nn.Module],
        threat: Threat,
        replays: int = 8,
        optimizer: OptimizerCallable = torch.optim.SGD,
        lr_scheduler: LRSchedulerCallable | None = None,
        attack_target: str | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if replays < 1:
            raise ValueError(f"replays must be at least 1, got {replays}")
        if threat.relative:
            raise ValueError(f"FreeTraining is for a radius in pixel units, got {threat}")
        self.net = net
        self.defense = Single(net())
        self.attack_target = attack_target
        self._target: tuple[nn.Module, ...] = ()  # in a tuple: no part of what is saved
        self.threat = threat
        self.replays = replays
        self.delta = torch.zeros(0)
        self._live = self.delta

    def on_fit_start(self) -> None:
        """Load the opponent, if there is one."""
        if self.attack_target is not None:
            kind = next(self.defense.parameters())
            net = load_weights(self.net(), self.attack_target).to(kind.device, kind.dtype)
            self._target = (net.eval().requires_grad_(False),)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy on the images with the perturbation as it stands."""
        missing = max(len(x) - len(self.delta), 0)
        self.delta = torch.cat([self.delta.to(x), x.new_zeros(missing, *x.shape[1:])])
        # The gradient is taken by the image: clamping has none at a pixel that is black or white.
        self._live = self.threat.apply(self.delta[: len(x)], x).detach().requires_grad_()
        for target in self._target:
            height = classification_loss(target(self._live), y)
            (self._live.grad,) = torch.autograd.grad(height, self._live)
        seen = self._live.detach() if self._target else self._live
        return classification_loss(self.defense.logits(seen)[0], y)

    def on_after_backward(self) -> None:
        """Move the perturbation, by the gradient that the same pass has found."""
        assert self._live.grad is not None
        step = self.threat.eps * self.threat.steepest(self._live.grad.nan_to_num())
        anywhere = replace(self.threat, bounds=(-math.inf, math.inf))
        moved = self.delta[: len(step)] + step
        moved = anywhere.clip(moved, moved)
        self.delta = torch.cat([moved, self.delta[len(moved) :]])

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Replay the batch: each time a forward, a backward and a step."""
        for _ in range(self.replays):
            optimizer.step(closure=optimizer_closure)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the perturbation."""
        checkpoint["free"] = {"delta": self.delta.detach().cpu()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` stored."""
        self.delta = self.kept_in(checkpoint, "free")["delta"]
