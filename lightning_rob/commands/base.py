"""A built run, as the command line hands it to a command."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from lightning_rob.data import ImageData
from lightning_rob.files import atomic_write_text
from lightning_rob.modules import RobustModule


@dataclass(frozen=True)
class Run:
    """Module, data and trainer of a recipe or of a checkpoint, as `test` would use them.

    Args:
        model: with the weights of the checkpoint, if there is one.
        data: data module.
        trainer: trainer.
        recipe: the whole configuration as plain data, defaults included.
        name: stem of the first configuration file; "study" without one.
        checkpoint: path of the checkpoint.
        command: the command line, for records.
    """

    model: RobustModule
    data: ImageData
    trainer: Trainer
    recipe: dict[str, Any]
    name: str = "study"
    checkpoint: str | None = None
    command: str = ""


def write_config(config: Mapping[str, Any], path: Path, header: str = "") -> None:
    """Write a configuration as a file that `--config` takes beside others.

    Callbacks become `callbacks+`, which adds to those of other files instead of replacing them.

    Args:
        config: the whole configuration as plain data.
        path: the file.
        header: comment lines before it.
    """
    trainer = dict(config["trainer"])
    if callbacks := trainer.pop("callbacks", None):
        trainer["callbacks+"] = callbacks
    content = yaml.safe_dump({**config, "trainer": trainer}, sort_keys=False)
    atomic_write_text(path, header + content)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence what Lightning logs for every trainer: its devices, why it stopped."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch, once per training
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
