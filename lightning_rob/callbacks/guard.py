"""Stop a run on non-finite losses, gradients or weights, and on signals."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rob.runtime.errors import Fault
from lightning_rob.runtime.processes import stop

GRADIENT, LOSS = 1.0, 2.0


class TerminateOnNonFinite(Callback):
    """Stop all processes before the optimizer steps if a loss or gradient is non-finite on one.

    No checkpoint is written of non-finite weights, and none is tested. SIGTERM and Ctrl-C end a
    training after its batch, in which the optimizer steps on all processes or on none, and an
    evaluation at once. Training is otherwise unchanged.

    Args:
        rank_timeout: seconds after which a process that others wait for counts as hung; None for
            the strategy's own.
    """

    def __init__(self, rank_timeout: float | None = None) -> None:
        self.rank_timeout = rank_timeout
        self.loss: Tensor | None = None
        self.fault: Fault | None = None
        self.signal = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the time-out, now that all processes are there: starting them may take longer."""
        group = torch.distributed.group.WORLD
        if self.rank_timeout is not None and group is not None:
            group.set_timeout(timedelta(seconds=self.rank_timeout))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals."""
        self.loss, self.signal = None, 0
        self._handle_signals(trainer)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Add up the loss over all batches that a step accumulates."""
        loss = loss.detach()
        self.loss = loss if self.loss is None else self.loss + loss

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Share losses, gradients and signals with the other processes.

        This waits for the device once a step: later the optimizer would have stepped already.

        Raises:
            Fault: a loss or a gradient is not finite, here or elsewhere.
        """
        notes = torch.zeros(trainer.world_size, 2, device=pl_module.device)
        notes[trainer.global_rank, 0] = self._nonfinite_part(trainer, optimizer)
        notes[trainer.global_rank, 1] = stop.received
        if trainer.world_size > 1:
            torch.distributed.all_reduce(notes)
        self.loss = None
        found, signals = notes.T.tolist()
        self.signal = int(max(signals))
        if any(found):
            self._raise(trainer, pl_module, found)

    def _nonfinite_part(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Tensor | float:
        """Return LOSS or GRADIENT if that is non-finite, else 0, on the device without a sync."""
        found: Tensor | float = 0.0
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        # With a scaler gradients overflow now and then, and it leaves out the step itself.
        if gradients and getattr(trainer.precision_plugin, "scaler", None) is None:
            largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
            found = GRADIENT * ~largest.isfinite()
        if self.loss is not None:
            found = torch.where(self.loss.isfinite(), found, LOSS)
        return found

    def _raise(self, trainer: Trainer, pl_module: LightningModule, found: list[float]) -> None:
        """Raise a Fault that names the loss first: it makes every gradient non-finite."""
        worst = max(found)
        ranks = [str(rank) for rank, found in enumerate(found) if found == worst]
        what = "the loss" if worst == LOSS else f"the gradient of {_nonfinite_gradient(pl_module)}"
        where = f" on process {', '.join(ranks)}" if len(found) > 1 else ""
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self.fault = Fault(
            f"{what} is not finite in epoch {trainer.current_epoch}, batch {batch}{where}: the "
            "optimizer has not stepped; lower the learning rate or clip gradients"
        )
        raise self.fault

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Exit if all processes know of a signal."""
        if self.signal or trainer.world_size == 1:
            stop.leave(self.signal)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Exit if a signal came while Python could not handle it."""
        stop.leave()

    def on_test_batch_end(self, *_: Any) -> None:
        """Exit if a signal came while Python could not handle it."""
        stop.leave()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to write non-finite weights.

        Raises:
            Fault: a weight is non-finite.
        """
        if name := _nonfinite_name(pl_module):
            raise self.fault or Fault(f"{name} is not finite: no checkpoint is written of it")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals."""
        self._handle_signals(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals."""
        self._handle_signals(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the weights."""
        self._check_weights(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the weights."""
        self._check_weights(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the weights again, before any result is reported."""
        self._check_weights(trainer, pl_module)

    def _check_weights(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Handle signals, and refuse to evaluate non-finite weights."""
        self._handle_signals(trainer)
        name = _nonfinite_name(pl_module)
        if not trainer.strategy.reduce_boolean_decision(not name):
            raise Fault(
                f"{name or 'a weight of another process'} is not finite: what it answers "
                "says nothing"
            )

    def _handle_signals(self, trainer: Trainer) -> None:
        stop.defer = lambda: bool(trainer.training)
        stop.install()  # from Lightning, which makes a collective of it, and then exits with code 0


def _nonfinite_name(module: torch.nn.Module) -> str | None:
    """Return the first non-finite weight, or buffer with a NaN; masks may hold infinities."""
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            return name
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            return name
    return None


def _nonfinite_gradient(module: torch.nn.Module) -> str:
    """Return the first weight whose gradient is non-finite."""
    named = ((name, weight.grad) for name, weight in module.named_parameters())
    bad = (name for name, grad in named if grad is not None and not grad.isfinite().all())
    return next(bad, "a weight")
