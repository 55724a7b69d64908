"""What watches over every run from the command line."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rob.errors import Fault
from lightning_rob.processes import stop

GRADIENT, LOSS = 1.0, 2.0


class TerminateOnNonFinite(Callback):
    """Stops all processes before an optimizer steps by what is not finite on one of them.

    No checkpoint is written of weights that are not finite, and none is tested. SIGTERM and Ctrl-C
    end a training after its batch, in which the optimizer steps on all processes or on none, and an
    evaluation at once. Nothing of the training is touched.

    Args:
        rank_timeout: seconds after which a process that others wait for counts as hung; None for
            what the strategy has.
    """

    def __init__(self, rank_timeout: float | None = None) -> None:
        self.rank_timeout = rank_timeout
        self.loss: Tensor | None = None
        self.fault: Fault | None = None
        self.told = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the time-out, now that all processes are there: starting them may take longer."""
        group = torch.distributed.group.WORLD
        if self.rank_timeout is not None and group is not None:
            group.set_timeout(timedelta(seconds=self.rank_timeout))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Heed signals."""
        self.loss, self.told = None, 0
        self._heed(trainer)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Note the loss, over all batches that a step accumulates."""
        loss = loss.detach()
        self.loss = loss if self.loss is None else self.loss + loss

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Compare notes with the other processes.

        This waits for the device once a step: to know later would be to have stepped already.

        Raises:
            Fault: a loss or a gradient is not finite, here or elsewhere.
        """
        notes = torch.zeros(trainer.world_size, 2, device=pl_module.device)
        notes[trainer.global_rank, 0] = self._sickness(trainer, optimizer)
        notes[trainer.global_rank, 1] = stop.received
        if trainer.world_size > 1:
            torch.distributed.all_reduce(notes)
        self.loss = None
        found, told = notes.T.tolist()
        self.told = int(max(told))
        if any(found):
            self._raise(trainer, pl_module, found)

    def _sickness(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Tensor | float:
        """LOSS or GRADIENT if that is not finite, else 0; on the device, without a wait for it."""
        sickness: Tensor | float = 0.0
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        # With a scaler gradients overflow now and then, and it leaves out the step itself.
        if gradients and getattr(trainer.precision_plugin, "scaler", None) is None:
            largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
            sickness = GRADIENT * ~largest.isfinite()
        if self.loss is not None:
            sickness = torch.where(self.loss.isfinite(), sickness, LOSS)
        return sickness

    def _raise(self, trainer: Trainer, pl_module: LightningModule, found: list[float]) -> None:
        """Say where it is: a loss rather than the gradients that it spoils everywhere."""
        worst = max(found)
        ranks = [str(rank) for rank, sickness in enumerate(found) if sickness == worst]
        what = "the loss" if worst == LOSS else f"the gradient of {_culprit(pl_module)}"
        where = f" on process {', '.join(ranks)}" if len(found) > 1 else ""
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self.fault = Fault(
            f"{what} is not finite in epoch {trainer.current_epoch}, batch {batch}{where}: the "
            "optimizer has not stepped; lower the learning rate or clip gradients"
        )
        raise self.fault

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Leave, if a signal came that all processes know of."""
        if self.told or trainer.world_size == 1:
            stop.leave(self.told)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Leave, if a signal came while Python was not listening."""
        stop.leave()

    def on_test_batch_end(self, *_: Any) -> None:
        """Leave, if a signal came while Python was not listening."""
        stop.leave()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to write weights that are not finite.

        Raises:
            Fault: so they are.
        """
        if name := _not_finite(pl_module):
            raise self.fault or Fault(f"{name} is not finite: no checkpoint is written of it")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Heed signals."""
        self._heed(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Heed signals."""
        self._heed(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the weights."""
        self._look(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the weights."""
        self._look(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the weights again, before any figure is told."""
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Heed signals, and refuse to tell figures of weights that are not finite."""
        self._heed(trainer)
        name = _not_finite(pl_module)
        if not trainer.strategy.reduce_boolean_decision(not name):
            raise Fault(
                f"{name or 'a weight of another process'} is not finite: what it answers "
                "says nothing"
            )

    def _heed(self, trainer: Trainer) -> None:
        stop.defer = lambda: bool(trainer.training)
        stop.install()  # from Lightning, which makes a collective of it, and then exits with code 0


def _not_finite(module: torch.nn.Module) -> str | None:
    """The first weight that is not finite, or buffer with a NaN; masks hold infinities."""
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            return name
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            return name
    return None


def _culprit(module: torch.nn.Module) -> str:
    """The first weight whose gradient is not finite."""
    named = ((name, weight.grad) for name, weight in module.named_parameters())
    sick = (name for name, gradient in named if gradient is not None and _sick(gradient))
    return next(sick, "a weight")


def _sick(gradient: Tensor) -> bool:
    return not bool(gradient.isfinite().all())
