"""Several monitors in one process: they take turns, and a broken one does not stop the others."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

from lightning_rob.commands.base import quiet_lightning
from lightning_rob.commands.configs import MissingRun, MonitorConfig
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.publisher import Publisher
from lightning_rob.commands.monitor.watcher import (
    Build,
    Steps,
    lower_priority,
    watched,
)
from lightning_rob.files import raise_thread_errors

Start = Callable[[], tuple[MonitorConfig, Build]]


def claimed(name: str, start: Start, homes: dict[Path, str]) -> tuple[MonitorConfig, Build]:
    """Return the options of a model, whose history becomes its own.

    Args:
        name: of the model.
        start: returns its options.
        homes: the model of each history.

    Raises:
        MissingRun: its checkpoints are not there.
        ValueError: another model has the same history, whose lock is of the whole process.
    """
    config, build = start()
    home = config.home.resolve()
    if (other := homes.setdefault(home, name)) != name:
        raise ValueError(f"{other} and {name} have one history, {home}: give each its out")
    return config, build


class Model:
    """One of several monitors, which is started again after a failure.

    Args:
        name: of the model.
        start: returns its options; raises an error if its checkpoints are not there.
        config: options of the process.
        publisher: where all models publish their state.
        homes: the model of each history, which the models share.
        end: of the process, by `monotonic`.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        config: MonitorConfig,
        publisher: Publisher,
        homes: dict[Path, str],
        end: float,
    ) -> None:
        self.name, self.start, self.config, self.publisher = name, start, config, publisher
        self.homes, self.end = homes, end
        self.steps: Steps | None = None
        self.due = 0.0  # time of the next step
        self.code: int | None = None
        self.failure = ""

    def step(self, last: bool) -> None:
        """Take the next step.

        Args:
            last: whether a failure is the end.
        """
        try:
            if self.steps is None:
                self.steps = watched(*self._started(), self.publisher, goes_on=True)
            self.due = monotonic() + next(self.steps)
            self.failure = ""
        except StopIteration as end:
            self.code = int(end.value)
        except Exception as error:  # of any kind: the others go on
            if os.environ.get("LIGHTNING_ROB_DEBUG"):
                raise
            self._fail(str(error) or type(error).__name__, last)

    def _started(self) -> tuple[MonitorConfig, Build]:
        """Return the options, with the minutes that the process has left."""
        config, build = claimed(self.name, self.start, self.homes)
        if self.end < float("inf"):
            config = replace(config, minutes=max(1e-9, (self.end - monotonic()) / 60))
        return config, build

    def _fail(self, reason: str, last: bool) -> None:
        """Report a failure once, and start again later."""
        self.close()
        if reason != self.failure:
            warn(f"{self.name}: {reason}" + ("" if last else "; trying again"))
        self.failure, self.code = reason, 2 if last else None
        self.due = monotonic() + self.config.every

    def close(self) -> None:
        """End the monitor."""
        if self.steps is not None:
            self.steps.close()
        self.steps = None


def _homes(starts: Mapping[str, Start]) -> dict[Path, str]:
    """Return the model of each history; one whose checkpoints are not there may come later."""
    homes: dict[Path, str] = {}
    for name, start in starts.items():
        with suppress(MissingRun):
            claimed(name, start, homes)
    return homes


def run(config: MonitorConfig, starts: Mapping[str, Start]) -> None:
    """Follow the checkpoints of all models, one checkpoint at a time.

    Args:
        config: options of the process.
        starts: by the name of the model.

    Raises:
        ValueError: an option without meaning, or two models with one history.
        SystemExit: with code 2 if a model failed at the end, else 1 after an alarm.
    """
    homes = _homes(starts)
    lower_priority()
    end = monotonic() + 60 * (float("inf") if config.minutes is None else config.minutes)
    with ExitStack() as stack:
        stack.enter_context(raise_thread_errors())
        stack.enter_context(quiet_lightning())
        publisher = Publisher(config)
        stack.callback(publisher.close)
        models = [
            Model(name, start, config, publisher, homes, end) for name, start in starts.items()
        ]
        for model in models:
            stack.callback(model.close)
        while waiting := [model for model in models if model.code is None]:
            following = min(waiting, key=lambda model: model.due)
            time.sleep(max(0.0, min(following.due, end) - monotonic()))
            following.step(last=config.is_over or monotonic() >= end)
            if config.stop_at_alarm and following.code == 1:
                break
    if code := max(model.code or 0 for model in models):
        raise SystemExit(code)
