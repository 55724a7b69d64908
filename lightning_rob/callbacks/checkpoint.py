"""Checkpoints and early stopping by robust accuracy, in epochs in which it was measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_rob.callbacks.loggers import writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.robust_eval import RobustEval
from lightning_rob.evaluation.overfitting import EpochScores, Overfitting, better
from lightning_rob.evaluation.records import append_records
from lightning_rob.evaluation.results import WORST, EvaluationResult, worst_over

PREFIX = "val/robust/"


def measurers(trainer: Trainer, monitor: str) -> list[RobustEval]:
    """Return the callbacks that log a robust accuracy in some epoch."""
    evaluations = [c for c in trainer.callbacks if isinstance(c, RobustEval)]  # type: ignore[attr-defined]
    return [e for e in evaluations if e.measures(monitor.removeprefix(PREFIX))]


def measured(trainer: Trainer, monitor: str) -> bool:
    """Whether this epoch's validation logs the value; values that are not robust always are."""
    if not monitor.startswith(PREFIX):
        return True
    found = measurers(trainer, monitor)
    return bool(found) and all(evaluation.due(trainer) for evaluation in found)


def check_measured(trainer: Trainer, monitor: str) -> None:
    """Check that some epoch of the fit measures the monitored robust accuracy."""
    if not monitor.startswith(PREFIX) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    found = measurers(trainer, monitor)
    if not found:
        evaluations = [c for c in trainer.callbacks if isinstance(c, RobustEval)]  # type: ignore[attr-defined]
        known = [f"{PREFIX}{name}" for e in evaluations for name in e.attacks]
        name = monitor.removeprefix(PREFIX)
        of = "on the whole defense" if name == WORST else f"with an attack named {name!r}"
        raise MisconfigurationException(
            f"no RobustEval measures {monitor!r}: add one {of}, such as callbacks/pgd.yaml, or "
            f"monitor one of {known}"
        )
    every = math.lcm(*(e.every_n_epochs for e in found), trainer.check_val_every_n_epoch or 1)
    epochs, module = trainer.max_epochs, trainer.lightning_module
    validates = trainer.enable_validation and is_overridden("validation_step", module)
    if not validates or (epochs not in (None, -1) and every > epochs):
        raise MisconfigurationException(
            f"{monitor!r} would never be measured: it is every {every} epochs, of {epochs}, with "
            f"trainer.limit_val_batches {trainer.limit_val_batches}, and {type(module).__name__} "
            "needs a validation_step, which may be empty"
        )


class RobustCheckpoint(ModelCheckpoint):
    """Keep the checkpoints with the best robust accuracy, each of the epoch that was measured.

    ModelCheckpoint uses an old value in epochs in which RobustEval has not run, and writes after
    the epoch's end, when a member of an ensemble may have other weights again. This class writes at
    the end of a validation that measured the value. With `save_last` it also writes `last.ckpt`
    after every epoch.

    At the end of a fit it says, and writes to `overfitting.jsonl` in the run's folder, how robust
    accuracy changed since the best epoch; `overfitting` has it. See
    `lightning_rob.evaluation.Overfitting`.

    Args:
        monitor: logged value.
        mode: "max" if larger is better.
        filename: as of ModelCheckpoint; a "/" in the result becomes "-". None is the epoch and
            the value.
        **options: other options of ModelCheckpoint.
    """

    def __init__(
        self,
        monitor: str = "val/robust/worst",
        mode: str = "max",
        filename: str | None = None,
        **options: Any,
    ) -> None:
        filename = filename or f"{{epoch}}-{{{monitor}:.3f}}"
        super().__init__(monitor=monitor, mode=mode, filename=filename, **options)
        if self._every_n_train_steps or self._train_time_interval is not None:
            raise ValueError(
                "RobustCheckpoint writes when there is a new figure: set every_n_epochs, and add a "
                "ModelCheckpoint for steps or time"
            )
        self._save_on_train_epoch_end = False
        self.best: Sequence[EpochScores] = ()
        self.latest: EpochScores | None = None
        self.overfitting: Overfitting | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_measured(trainer, str(self.monitor))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if measured(trainer, str(self.monitor)):
            self._keep_scores(trainer)
            last, self.save_last = self.save_last, False
            super().on_validation_end(trainer, pl_module)
            self.save_last = last

    def _keep_scores(self, trainer: Trainer) -> None:
        """Keep the scores of this epoch and of the best ones, image by image."""
        monitor = str(self.monitor)
        if trainer.sanity_checking or self.mode == "min" or not monitor.startswith(PREFIX):
            return
        found = measurers(trainer, monitor)
        # Callbacks that are evaluated together share a result.
        val = list({id(e.result): e.result for e in found if e.result is not None}.values())
        seen = torch.stack([val[0].rows.index, val[0].rows.label]).cpu().numpy()
        scores = scores_of(val, monitor.removeprefix(PREFIX))
        self.latest = EpochScores(trainer.current_epoch, crc32(seen.tobytes()), scores)
        self.best = better(self.best, self.latest)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how robust accuracy changed since the best epoch."""
        if self.latest is None:
            return
        folder = writing_folder(trainer)
        if len({one.images for one in (*self.best, self.latest)}) > 1:
            text = "validations had other images, so that epochs are not compared"
        else:
            self.overfitting = Overfitting.of(self.best, self.latest)
            text = str(self.overfitting)
            if folder is not None:
                record = self.overfitting.record() | {"name": self.monitor}
                append_records(folder / "overfitting.jsonl", [record])
        if trainer.is_global_zero:
            kept = f" Kept: {Path(self.best_model_path).name}." if self.best_model_path else ""
            text = f"{self.monitor}: {text}.{kept}"
            console_of(trainer).print(text, highlight=False, soft_wrap=True)

    def state_dict(self) -> dict[str, Any]:
        epochs = [tuple(one) for one in (*self.best, self.latest) if one is not None]
        return super().state_dict() | {"epochs": epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Lightning forgets what was the best where the run goes on in another folder.
        kept = {p: value for p, value in state_dict["best_k_models"].items() if Path(p).is_file()}
        if kept and not self.best_k_models:
            self.best_k_models = kept
            for name in ("best_model_score", "kth_value", "kth_best_model_path"):
                setattr(self, name, state_dict[name])
        if state_dict.get("epochs"):
            *self.best, self.latest = (EpochScores(*one[:3]) for one in state_dict["epochs"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def format_checkpoint_name(
        self,
        metrics: dict[str, Tensor],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return a file name without folders in it."""
        folder = Path(self.dirpath or "")
        path = super().format_checkpoint_name(metrics, filename, ver, prefix)
        return str(folder / str(Path(path).relative_to(folder)).replace("/", "-"))


def scores_of(results: Sequence[EvaluationResult], name: str) -> Tensor:
    """Return the scores [N] under an attack, or under the strongest of all results."""
    worst = name == WORST
    scores = worst_over(results).scores.mean(1) if worst else results[0].per_image(name)
    return scores.float().cpu()


class RobustEarlyStopping(EarlyStopping):
    """Stop when robust accuracy has not improved for `patience` epochs in which it was measured.

    Args:
        monitor: logged value.
        mode: "max" if larger is better.
        **options: other options of EarlyStopping.
    """

    def __init__(
        self, monitor: str = "val/robust/worst", mode: str = "max", **options: Any
    ) -> None:
        super().__init__(monitor=monitor, mode=mode, **options)
        self._check_on_train_epoch_end = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_measured(trainer, self.monitor)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if measured(trainer, self.monitor):
            super().on_validation_end(trainer, pl_module)
