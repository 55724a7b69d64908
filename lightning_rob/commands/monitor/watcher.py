"""Takes the checkpoints of a folder one by one, and evaluates each by the same suite."""

import errno
import os
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from lightning_rob.commands.base import Run, without_reporting
from lightning_rob.commands.checkpoints import load_weights, read_checkpoint
from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.comparison import (
    current_results,
    final_alarms,
    judged,
    previous_results,
    worst_scores,
)
from lightning_rob.commands.monitor.display import Display, warn
from lightning_rob.commands.monitor.folder import CheckpointFile, CheckpointFolder, broken_event
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    TensorBoardHistory,
    identity,
    tag,
    timestamp,
)
from lightning_rob.commands.monitor.suite import PeriodicAction, Suite
from lightning_rob.commands.scores import Scores
from lightning_rob.commands.thresholds import violations
from lightning_rob.errors import Fault, InputError
from lightning_rob.evaluation.records import SESSION, Result
from lightning_rob.files import UNWRITABLE, raise_thread_errors
from lightning_rob.identity import cache_key

NICE = 10
LOADING_ERRORS = (InputError, RuntimeError, ValueError, KeyError, TypeError)

Build = Callable[[Path], Run]  # checkpoint -> module, data and trainer by its recipe
Results = list[tuple[Result, Scores]]


def run(config: MonitorConfig, build: Build) -> None:
    """Follow the folder until one of the ends that the options name.

    Raises:
        ValueError: there is no checkpoint, or the attacks do not fit.
        InputError: the history cannot be written.
        SystemExit: with code 1 after an alarm.
    """
    _lower_priority()
    try:
        with raise_thread_errors(), closing(History(config.out or config.folder)) as history:
            code = _watch(Watcher(config, history, build))
    except OSError as error:
        if error.errno not in (*UNWRITABLE, errno.ENOTDIR, errno.EEXIST, errno.EACCES):
            raise  # for example, images that cannot be read
        raise InputError(f"the history cannot be written: {error}; see --out") from error
    if code:
        raise SystemExit(code)


def _lower_priority() -> None:
    """Leave the processor to the training."""
    if hasattr(os, "setpriority"):  # not on Windows
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, NICE))


def _watch(watcher: "Watcher") -> int:
    """Evaluate all checkpoints that appear, and return the exit code."""
    try:
        while (first := watcher.next_file(())) is not None:
            try:
                built = watcher.build(first.path)
            except InputError:
                if first.path.exists():
                    raise
                continue  # it was deleted before it was read: the next one will do
            watcher.follow(built, first)
            break
        if not watcher.history.lines:
            raise ValueError(f"there is no checkpoint in {watcher.config.folder}")
        return watcher.end()
    finally:
        watcher.board.writer.close()


class UnusableCheckpoint(Exception):
    """A checkpoint that cannot be evaluated, while others can."""


class Watcher:
    """Evaluates the checkpoints of a folder, and records the results in the history."""

    def __init__(self, config: MonitorConfig, history: History, build: Build) -> None:
        self.config = config
        self.history = history
        self.build = build
        self.display = Display()
        self.board = TensorBoardHistory(history.path.parent / "monitor", history)
        self.folder = CheckpointFolder(config.folder, history, self.record)
        minutes = float("inf") if config.minutes is None else config.minutes
        self.end_time = time.monotonic() + 60 * minutes
        self.suite = ""  # key of the suite
        self.first_recipe: str | None = None
        self.current_recipe: str | None = None  # of the suite's module

    def record(self, *lines: Fields) -> None:
        """Record and show lines, the last of which is an event."""
        self.history.append(*lines)
        self.board.add(lines)
        self.display.show(lines)

    def next_file(self, done: Collection[Identity]) -> CheckpointFile | None:
        """Wait for the next checkpoint whose identity is not done; return None at the end."""
        while not (self.config.stop_at_alarm and self.history.unreported()):
            over = self.config.once or (self.config.until and self.config.until.exists())
            left = self.end_time - time.monotonic()
            self.folder.scan()
            pending, unsettled = self.folder.pending(done), bool(self.folder.incomplete)
            if left <= 0 and pending:
                warn(f"time is up, {len(pending)} checkpoints were not evaluated: run it again")
            if left <= 0 or (over and not pending and not unsettled):
                return None
            if pending:
                return pending[0]
            time.sleep(min(1.0 if unsettled else self.config.every, left, self.config.every))
        return None

    def follow(self, built: Run, first: CheckpointFile) -> None:
        """Evaluate each checkpoint.

        Args:
            built: by the recipe of the first checkpoint.
            first: that checkpoint.

        Raises:
            ValueError: a threshold for an attack that the suite lacks.
        """
        with without_reporting(built.trainer) as (evaluations, others):
            suite = Suite(built, evaluations, others)
            known = {tag(name): 1.0 for name in suite.names}
            violations(self.config.minima, known, "monitor")  # raises it for an unknown name
            self.suite, self.first_recipe = suite.key, first.recipe
            self.current_recipe = first.recipe if first.unchanged else None
            while (file := self.next_file(self._done())) is not None:
                self.folder.in_evaluation = file.identity
                try:
                    self._evaluate(file, suite)
                finally:
                    self.folder.in_evaluation = None

    def _done(self) -> set[Identity]:
        """Return the checkpoints that need no evaluation by this suite.

        One whose scores are missing is evaluated again, for later ones are compared with it.
        """
        return {
            identity(event)
            for *results, event in self.history.groups()
            if event.get("suite") == self.suite
            and (event["event"] == "broken" or worst_scores(self.history, results) is not None)
        }

    def _evaluate(self, file: CheckpointFile, suite: Suite) -> None:
        """Evaluate and record a checkpoint, unless it is gone or unusable."""
        facts = self.folder.facts(file) | {"suite": suite.key}
        try:
            results = self._results(file, suite)
        except UnusableCheckpoint as error:
            self.record(facts | broken_event(facts["checkpoint"], str(error)))
            return
        if results:
            previous = previous_results(self.history, self.suite)  # before its own lines are there
            current = current_results(facts["checkpoint"], facts["step"], results)
            event = facts | {"event": "evaluated", "date": timestamp(), "session": SESSION}
            event |= judged(self.config, current, previous)
            self.record(*(self._line(*each, facts) for each in results), event)

    def _line(self, result: Result, scores: Scores, facts: Fields) -> Fields:
        """Write the scores of a result, and return its line."""
        key = cache_key(name=result.name, **{k: facts[k] for k in ("suite", "weights", "recipe")})
        self.history.scores.write(key, scores)
        details = result.details | {"reuse": self.history.scores.reference(key)}
        return replace(result, details=details).record() | facts | {"stage": "monitor"}

    def _results(self, file: CheckpointFile, suite: Suite) -> Results:
        """Return a checkpoint's results; none if the file has changed.

        Raises:
            UnusableCheckpoint: its weights do not fit the model or are not finite, or the model of
                its recipe cannot be built or attacked.
        """
        try:
            if file.recipe != self.current_recipe:
                suite.replace_module(self.build(file.path).model)
                self.current_recipe = file.recipe
            load_weights(suite.module, read_checkpoint(str(file.path)))
        except LOADING_ERRORS as error:
            if file.unchanged:
                raise UnusableCheckpoint(_reason(error)) from error
        if not file.unchanged:
            self.current_recipe = None  # the module may be that of the new file
            return []
        try:
            return suite.evaluate(PeriodicAction(self.folder.scan, self.config.every))
        except Fault as error:
            raise UnusableCheckpoint(str(error)) from error
        except ValueError as error:
            if file.recipe == self.first_recipe:
                raise  # the attacks are wrong, not the checkpoint
            raise UnusableCheckpoint(f"the model of its recipe: {error}") from error

    def end(self) -> int:
        """Return and record the exit code: 1 after an alarm since the last end, else 0.

        The last checkpoint is judged by the current options, however old its evaluation is.
        """
        alarmed = bool(self.history.unreported())
        previous = previous_results(self.history, self.suite)
        for text in () if alarmed else final_alarms(self.config, previous):
            warn(f"alarm: {text}")
            alarmed = True
        self.record({"event": "ended", "date": timestamp(), "code": int(alarmed)})
        return int(alarmed)


def _reason(error: Exception) -> str:
    """Return an error's first line; for weights of another architecture, a short reason."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "it is of another architecture than the model" if "state_dict" in first else first
