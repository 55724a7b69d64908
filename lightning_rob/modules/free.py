"""Free adversarial training: one backward pass updates weights and perturbation."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rob.defenses import Single
from lightning_rob.defenses.network import network_logits
from lightning_rob.modules.base import RobustModule
from lightning_rob.nets import load_weights
from lightning_rob.objectives import classification_loss
from lightning_rob.threat import Threat


class FreeTraining(RobustModule):
    """Adversarial training at the cost of standard training (Shafahi et al. 2019, Algorithm 1).

    Each batch is replayed m times. One backward pass yields two gradients: the optimizer steps
    along the first, of the weights; the perturbation takes a step of length eps along the second
    and is projected into the ball. The next replay and the next batch start from this perturbation,
    image position by image position.

    An epoch costs m times as much: like the paper, divide the epochs of standard training and the
    milestones of its schedule by m. `trainer.global_step` counts batches, not replays. Several
    processes all resume with the perturbation of rank 0.

    Args:
        net: builds the network, [B, C, H, W] -> [B, K].
        threat: the ball; linf in the paper, or l2; not relative.
        replays: m, at least 1; the paper uses 8 for CIFAR-10 and 4 for ImageNet.
        attack_target: checkpoint of a trained network of the same architecture, whose adversarial
            images to train on, like the second member of BAT (ARC paper, appendix B.1). The
            perturbation follows its gradient, at one more forward and backward pass per replay.
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
        self._target: tuple[nn.Module, ...] = ()  # a tuple, not a submodule: not saved
        self.threat = threat
        self.replays = replays
        self.delta = torch.zeros(0)
        self._perturbed = self.delta  # the current images, which receive the gradient

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.attack_target is not None:
            weight = next(self.defense.parameters())
            net = load_weights(self.net(), self.attack_target).to(weight.device, weight.dtype)
            self._target = (net.eval().requires_grad_(False),)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # A position that no batch has had yet starts from the clean image.
        missing = max(len(x) - len(self.delta), 0)
        self.delta = torch.cat([self.delta.to(x), x.new_zeros(missing, *x.shape[1:])])
        # The gradient is by the perturbed image: by the perturbation it would be zero where the
        # image is clamped to [0, 1], as at black and white pixels.
        x_adv = self._perturbed = self.threat.apply(self.delta[: len(x)], x).detach()
        x_adv.requires_grad_()
        for target in self._target:
            target_loss = classification_loss(network_logits(target, x_adv), y)
            (x_adv.grad,) = torch.autograd.grad(target_loss, x_adv)
        x = x_adv.detach() if self._target else x_adv
        return classification_loss(self.defense.logits(x)[0], y)

    def on_after_backward(self) -> None:
        assert self._perturbed.grad is not None
        step = self.threat.eps * self.threat.direction(self._perturbed.grad.nan_to_num())
        unbounded = replace(self.threat, bounds=(-math.inf, math.inf))  # `loss` clamps the images
        delta = self.delta[: len(step)] + step
        delta = unbounded.clip(delta, delta)
        self.delta = torch.cat([delta, self.delta[len(delta) :]])

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for _ in range(self.replays):
            optimizer.step(closure=optimizer_closure)  # which runs both passes anew

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["free"] = {"delta": self.delta.detach().cpu()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.delta = self.saved_state(checkpoint, "free")["delta"]
