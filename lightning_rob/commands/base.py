"""A built run, as the command line hands it to a command."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import SaveConfigCallback

from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.images import Inputs
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.records import versions
from lightning_rob.modules.base import trained_threats
from lightning_rob.threat import Threat

WITHOUT_EFFECT = ("batch_size", "eval_batch_size", "workers")  # options of data


@dataclass(frozen=True)
class Run:
    """Module, data and trainer of a recipe or of a checkpoint, as `test` would use them."""

    model: LightningModule  # with the weights of the checkpoint, if there is one
    data: LightningDataModule
    trainer: Trainer
    recipe: dict[str, Any]  # the whole configuration as plain data, defaults included
    name: str = "study"  # stem of the first configuration file
    checkpoint: str | None = None
    command: str = ""  # for records
    overrides: tuple[tuple[str, Any], ...] = ()  # options that change the model of a checkpoint

    @property
    def inputs(self) -> Inputs:
        """How batches become images: what a plugged-in `RobustEval` says."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return next((c.inputs for c in callbacks if isinstance(c, RobustEval)), Inputs())

    @property
    def defense(self) -> Defense:
        """The module's `defense`, or the module itself as a network."""
        return as_defense(self.model, self.inputs.preprocess)

    def test_with(self, callback: EvaluationCallback) -> None:
        self.trainer.callbacks.append(callback)  # type: ignore[attr-defined]
        self.trainer.test(self.model, self.data, self.checkpoint, False, weights_only=True)

    def settings(self) -> dict[str, Any]:
        """Return what scores depend on beside weights and attacks."""
        trainer = {n: self.recipe["trainer"][n] for n in ("limit_test_batches", "precision")}
        data = dict(self.recipe["data"])
        if self.trainer.limit_test_batches == 1.0:
            options = data.get("init_args") or {}
            # Every image is evaluated: in which batches does not matter.
            data["init_args"] = {k: v for k, v in options.items() if k not in WITHOUT_EFFECT}
        else:
            trainer["world_size"] = self.trainer.world_size
        found = {"model": self.recipe["model"], "data": data, "trainer": trainer}
        if self.defense.transductive:
            # Such a defense adapts to a batch as a whole.
            found["round"] = getattr(self.data, "eval_batch_size", None)
        return found | {"versions": versions()}


def trained_threat(module: Any) -> Threat | None:
    """Return the threat of a module's training, of several the first; None without attacks."""
    return next(iter(trained_threats(module)), None)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence what Lightning logs for every trainer: its devices, why it stopped."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def without_reporting(trainer: Trainer) -> Iterator[tuple[list[RobustEval], list[Callback]]]:
    """Take a trainer's loggers and its evaluation, progress-bar and config callbacks away.

    Yields its `RobustEval` callbacks, and those that remain.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    reporting = (EvaluationCallback, ProgressBar, SaveConfigCallback)
    others = [callback for callback in callbacks if not isinstance(callback, reporting)]
    loggers, trainer.loggers = trainer.loggers, []
    try:
        with quiet_lightning():
            yield [c for c in callbacks if isinstance(c, RobustEval)], others
    finally:
        trainer.loggers = loggers
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
