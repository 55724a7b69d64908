"""Figures of evaluations for a logger of Lightning, whose server may be away or hang."""

import math
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from lightning.pytorch.loggers import Logger

from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import Fields, scalars
from lightning_rob.commands.monitor.source import without_secrets

REST = 9  # seconds without a try for each second that a logger took: a tenth of the time is its


class FigureLog:
    """Figures that wait for a logger; one that fails gets them later."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.waiting: list[Sequence[Fields]] = []
        self.due = 0.0  # time of the next try, by `monotonic`
        self.failed = False

    def add(self, lines: Sequence[Fields]) -> None:
        """Let the figures of lines that end with an event wait."""
        if scalars(lines):
            self.waiting.append(lines)

    def write(self) -> None:
        """Log what waits, unless the logger took its share of the time already."""
        began = monotonic()
        if not self.waiting or began < self.due:
            return
        try:
            while self.waiting and monotonic() < began + 1:
                lines = self.waiting[0]
                self.logger.log_metrics(scalars(lines), lines[-1]["step"])
                del self.waiting[0]
            self.logger.save()
            self.failed = False
        except Exception as error:  # any package may raise anything; the other loggers go on
            if not self.failed:
                reason = without_secrets(f"{type(error).__name__}: {error}")
                warn(f"figures could not be logged ({reason}); trying again")
            self.failed = True
        self.due = monotonic() + REST * (monotonic() - began)

    def close(self, patient: bool) -> None:
        """Let the logger finish, after another try to log what waits if there is time for it."""
        self.due = 0.0 if patient else math.inf
        self.write()
        with suppress(Exception):  # a logger may raise anything
            self.logger.finalize("success")
