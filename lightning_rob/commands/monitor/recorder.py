"""Where the events of a monitor go: history, curves, terminal and notifications."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.display import Display, warn
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    TensorBoardHistory,
    scalars,
)
from lightning_rob.commands.monitor.notify import Notifier
from lightning_rob.commands.monitor.source import without_secrets
from lightning_rob.files import UNWRITABLE

Written = TypeVar("Written")


class Recorder:
    """Records events, and waits while the disk is full.

    Args:
        config: options.
        history: of the run.
    """

    def __init__(self, config: MonitorConfig, history: History) -> None:
        self.config = config
        self.history = history
        self.display = Display(config.label)
        self.loggers: list[Logger] = []  # beside TensorBoard
        self.logging = True  # whether they could take the last figures
        self.board: TensorBoardHistory | None = TensorBoardHistory(
            history.path.parent / "monitor", history
        )
        minutes = float("inf") if config.minutes is None else config.minutes
        self.end_time = time.monotonic() + 60 * minutes
        self.writable = True
        self.waited: Callable[[], None] | None = None  # called during a wait for the disk
        self.notifier = Notifier(config.notify or (), history, config.name)

    def __call__(self, *lines: Fields) -> None:
        """Record and show lines, the last of which is an event."""
        event = lines[-1] | self.notifier.mark(lines[-1])
        lines = (*lines[:-1], event)
        self.when_writable(lambda: self.history.append(*lines))
        self._draw(lines)
        self._log(lines)
        self.display.show(lines)
        self.notifier.send(lines)

    @property
    def is_over(self) -> bool:
        """Whether no further checkpoints are awaited."""
        return self.config.is_over

    @property
    def left(self) -> float:
        """Seconds until the end that `--minutes` names."""
        return self.end_time - time.monotonic()

    def take_loggers(self, trainer: Trainer) -> None:
        """Log to a trainer's loggers, of the first suite, instead of the trainer."""
        self.loggers = self.loggers or trainer.loggers
        trainer.loggers = []

    def when_writable(self, write: Callable[[], Written]) -> Written:
        """Return what a function returns that writes; while the disk is full try again.

        Raises:
            OSError: it cannot write, and the monitor is about to end.
        """
        while True:
            try:
                result = write()
            except OSError as error:
                if error.errno not in UNWRITABLE or self.is_over:
                    raise
                if (left := self.left) <= 0:
                    raise
                self._wait(str(error), left)
                continue
            if not self.writable:
                warn("the history can be written again")
            self.writable = True
            return result

    def _wait(self, reason: str, left: float) -> None:
        if self.writable:
            warn(f"the history cannot be written ({reason}); trying again")
        self.writable = False
        if self.waited:
            self.waited()
        time.sleep(min(self.config.every, left))

    def _draw(self, lines: Sequence[Fields]) -> None:
        """Add lines to the curves; after a failure the next start writes them anew."""
        if self.board:
            try:
                self.board.add(lines)
            except OSError as error:
                warn(f"the curves end here ({error}); the next monitor writes them anew")
                self.board = None

    def _log(self, lines: Sequence[Fields]) -> None:
        """Log the figures of an evaluation; a server that is away does not end the monitor."""
        if not (figures := scalars(lines)):
            return
        failures: list[Exception] = []
        for logger in self.loggers:
            try:
                logger.log_metrics(figures, lines[-1]["step"])
                logger.save()
            except Exception as error:  # of any package; the other loggers get theirs
                failures.append(error)
        if failures and self.logging:
            reason = f"{type(failures[0]).__name__}: {failures[0]}"
            warn(f"figures could not be logged ({without_secrets(reason)})")
        self.logging = not failures

    def close(self, patience: float) -> None:
        """End; wait `patience` seconds for the receivers of notifications."""
        self.notifier.close(patience)
        for logger in self.loggers:
            with suppress(Exception):  # of any package; the history has the figures
                logger.finalize("success")
        with suppress(OSError):
            if self.board:
                self.board.writer.close()
