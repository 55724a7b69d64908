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
        self.loss, self.signal = None, 0
        self.on_predict_start(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stop.defer = lambda: bool(trainer.training)
        stop.install()  # from Lightning, which makes a collective of it, and then exits with code 0

    on_sanity_check_start = on_predict_start

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Add up the loss over all batches that a step accumulates."""
        self.loss = loss.detach() + (0 if self.loss is None else self.loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Share losses, gradients and signals with the other processes."""
        notes = torch.zeros(trainer.world_size, 2, device=pl_module.device)
        notes[trainer.global_rank, 0] = self._nonfinite_part(trainer, optimizer)
        notes[trainer.global_rank, 1] = stop.received
        if trainer.world_size > 1:
            torch.distributed.all_reduce(notes)
        self.loss = None
        found, signals = notes.T.tolist()
        self.signal = int(max(signals))
        if not any(found):
            return
        if max(found) == LOSS:  # which makes every gradient non-finite
            what = "the loss"
        else:
            named = ((name, weight.grad) for name, weight in pl_module.named_parameters())
            bad = (name for name, grad in named if grad is not None and not grad.isfinite().all())
            what = f"the gradient of {next(bad, 'a weight')}"
        ranks = [str(rank) for rank, one in enumerate(found) if one == max(found)]
        where = f" on process {', '.join(ranks)}" if len(found) > 1 else ""
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self.fault = Fault(
            f"{what} is not finite in epoch {trainer.current_epoch}, batch {batch}{where}: the "
            "optimizer has not stepped; lower the learning rate or clip gradients"
        )
        raise self.fault

    def _nonfinite_part(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> float:
        """Return LOSS or GRADIENT if that is non-finite, else 0."""
        if self.loss is not None and not self.loss.isfinite():
            return LOSS
        # With a scaler gradients overflow now and then, and it leaves out the step itself.
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return 0.0
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        gradients = [gradient for gradient in gradients if gradient is not None]
        largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
        return 0.0 if largest.isfinite() else GRADIENT

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.signal or trainer.world_size == 1:
            stop.leave(self.signal)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Exit if a signal came while Python could not handle it."""
        stop.leave()

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if name := _nonfinite_name(pl_module):
            raise self.fault or Fault(f"{name} is not finite: no checkpoint is written of it")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_predict_start(trainer, pl_module)
        name = _nonfinite_name(pl_module)
        if not trainer.strategy.reduce_boolean_decision(not name):
            raise Fault(
                f"{name or 'a weight of another process'} is not finite: its predictions say "
                "nothing"
            )

    on_test_start = on_validation_start
    on_test_epoch_end = on_validation_start  # before any result is reported


def _nonfinite_name(module: torch.nn.Module) -> str | None:
    """Return the first non-finite weight, or buffer with a NaN; masks may hold infinities."""
    for name, weight in module.named_parameters():
        if not weight.isfinite().all():
            return name
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            return name
    return None
