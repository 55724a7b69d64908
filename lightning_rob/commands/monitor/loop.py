"""One loop over sources: evaluate each new checkpoint, judge it, record and notify the event."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from lightning_rob.commands.base import Run, quiet_lightning
from lightning_rob.commands.checkpoints import RECIPE, load_weights
from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.commands.monitor.comparison import (
    current_results,
    final_alarms,
    judged,
    worst_of,
)
from lightning_rob.commands.monitor.display import Display, warn
from lightning_rob.commands.monitor.figures import FigureLog
from lightning_rob.commands.monitor.folder import CheckpointFile, CheckpointFolder, broken_event
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    identity,
    tag,
    timestamp,
)
from lightning_rob.commands.monitor.notify import PATIENCE, Outbox
from lightning_rob.commands.monitor.page import Snapshot, newest_group
from lightning_rob.commands.monitor.publish import Publisher
from lightning_rob.commands.monitor.scores import Scores
from lightning_rob.commands.monitor.source import (
    Bucket,
    LocalFolder,
    RegisteredModel,
    Replaced,
    Source,
    Unreachable,
)
from lightning_rob.commands.monitor.suite import Suite
from lightning_rob.commands.thresholds import violations
from lightning_rob.evaluation.records import Result
from lightning_rob.runtime.errors import Fault, InputError, reason_of
from lightning_rob.runtime.files import UNWRITABLE
from lightning_rob.runtime.identity import cache_key

NICE = 10
CACHE = "monitor_cache"  # in the folder of the history, for a remote checkpoint that is read

Build = Callable[[Path], Run]  # checkpoint -> module, data and trainer by its recipe
Start = Callable[[], tuple[MonitorConfig, Build]]


def run(config: MonitorConfig, starts: Mapping[str, Start]) -> None:
    """Follow the checkpoints of all sources, one checkpoint at a time."""
    if hasattr(os, "setpriority"):  # not on Windows; it leaves the processor to the training
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), NICE))
    sources: list[Watched] = []
    homes: dict[Path, str] = {}
    with ExitStack() as stack:
        stack.enter_context(quiet_lightning())
        publisher = stack.enter_context(closing(Publisher(config)))
        for name, start in starts.items():
            one, build = start()  # a mistake in the options ends the process at once
            home = one.home.resolve()
            if (other := homes.setdefault(home, name)) != name:
                raise ValueError(f"{other} and {name} have one history, {home}: give each its out")
            sources.append(Watched(name, one, build, publisher))
            stack.callback(sources[-1].close)
        while waiting := [source for source in sources if source.code is None]:
            following = min(waiting, key=lambda source: source.due)
            if (pause := following.due - monotonic()) > 0:
                time.sleep(pause)
            following.turn()
    if code := max(source.code or 0 for source in sources):
        raise SystemExit(code)


@dataclass(eq=False)
class Watched:
    """A source, its history, and the suite by which its checkpoints are evaluated."""

    name: str
    config: MonitorConfig
    build: Build
    publisher: Publisher
    due: float = 0.0  # time of the next turn, by `monotonic`
    code: int | None = None  # exit code, once it has ended
    failure: str = ""  # why the last turn failed
    looked_at: float | None = None  # by `monotonic`, None before the first look
    suite: Suite | None = None
    key: str = ""  # of the suite
    recipe: str | None = None  # recipe of the suite's module
    done: set[Identity] = field(default_factory=set)  # need no evaluation by the suite
    logs: list[FigureLog] = field(default_factory=list)
    opened: ExitStack | None = None

    @property
    def label(self) -> str:
        """The beginning of a line about the source, where there are several."""
        return f"{self.name}: " if self.name else ""

    def turn(self) -> None:
        """Take a step; if one of several sources fails, alarm and try again later."""
        last = self.config.is_over
        try:
            if self.opened is None:
                self.open()
            self.due = monotonic() + self.step()
            if self.failure:
                warn(f"{self.label}{self.config.run} can be watched again")
            self.failure = ""
        except Exception as error:
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                # All that was evaluated is on the disk: a supervisor starts the monitor again.
                raise InputError(f"the history cannot be written: {error}; see --out") from error
            away = isinstance(error, Unreachable) and self.looked_at is not None and not last
            if not (self.name or away):
                raise
            self.due = monotonic() + self.config.every
            reason = _reason(error)
            if self.opened and not (away or last):
                # An alarm, which ends with the next checkpoint that is evaluated without one.
                known = self.history.alarm()
                if known is None or not known["alarm"][0].endswith(reason):
                    self.record(broken_event(self.config.name, reason))
                self.suite, self.key, self.done = None, "", set()
            elif reason != self.failure:
                warn(f"{self.label}{reason}" + ("" if last else "; trying again"))
            self.failure, self.code = reason, 2 if last else None
        if self.code is not None:
            self.close()

    def open(self) -> None:
        """Open source and history; a failure leaves no lock behind."""
        self.config.check_run()
        home, url = self.config.home, self.config.url
        source: Source = LocalFolder(self.config.folder, self.config.file)
        if url is not None:
            source = (RegisteredModel if url.startswith("mlflow:") else Bucket)(url, home / CACHE)
        with ExitStack() as stack:
            try:
                self.history = stack.enter_context(closing(History(home)))
            except OSError as error:
                raise InputError(f"the history cannot be written: {error}; see --out") from error
            self.display = Display(self.label)
            self.outbox = Outbox(self.config.notify or (), self.history, self.config.name)
            self.folder = CheckpointFolder(source, self.history, self.record)
            stack.callback(self.publish)  # after the last deliveries
            # The next monitor delivers the rest.
            stack.callback(lambda: self.outbox.close(PATIENCE if self.code in (0, 1) else 0.0))
            self.opened = stack.pop_all()
        warn(f"{self.label}watching {self.config.run}; the history is {self.history.path}")

    def close(self) -> None:
        if self.opened is not None:
            opened, self.opened = self.opened, None
            opened.close()
            for log in self.logs:
                log.close(patient=self.code is not None)

    def step(self) -> float:
        """Look, and evaluate the next checkpoint; return the seconds until the next step."""
        over = self.config.is_over  # before the look: what came before the end is evaluated
        self.look()
        pending = self.pending()
        if over and not pending and not self.folder.waiting:
            self.finish()
            return 0.0
        if not pending:
            every = min(1.0, self.config.every) if self.folder.waiting else self.config.every
            return min([every, *filter(None, self.outbox.pauses.values())])
        if self.suite is None:
            self.build_suite()
        if self.suite and (pending := self.pending()):
            self.evaluate(pending[0])
        return 0.0

    def look(self) -> None:
        self.outbox.deliver()
        for log in self.logs:
            log.write()
        self.folder.scan()
        self.looked_at = monotonic()
        self.folder.hold(self.pending())
        self.publish()

    def publish(self) -> None:
        if self.publisher.server:
            group = newest_group(self.history, self.key)
            state = Snapshot(group, self.history, len(self.pending()), self.outbox.waiting)
            self.publisher.update(self.config.name, state)

    def pending(self) -> list[CheckpointFile]:
        """Return the checkpoints that wait for an evaluation, in the order of training."""
        return self.folder.pending(self.done)

    def _done(self) -> set[Identity]:
        # Later checkpoints are compared by scores: without them a checkpoint is evaluated again.
        done = [
            identity(event)
            for *results, event in self.history.groups()
            if event.get("suite") == self.key
            and event["event"] in ("evaluated", "broken")
            and (event["event"] == "broken" or self.history.scores.read(worst_of(results)))
        ]
        # As a single file an earlier model may be deployed again: only the last evaluation counts.
        return set(done[-1:] if self.config.is_single else done)

    def built(self, file: CheckpointFile) -> Run:
        """Build what the recipe of a checkpoint describes; its weights are not read again."""
        recipe = {} if file.config is None else {RECIPE: file.config}
        with TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.ckpt"
            torch.save({"state_dict": {}} | recipe, path)
            return self.build(path)

    def build_suite(self) -> None:
        """Build the suite by the recipe of the first checkpoint for which that is possible."""
        self.suite, self.key = None, ""
        failures: dict[str, Exception] = {}
        for file in self.folder.files:
            if file.recipe in failures:
                continue
            try:
                built = self.built(file)
                loggers = built.trainer.loggers
                suite = Suite(built)
                known = {tag(name): 1.0 for name in (*suite.names, "blind", "findings")}
                violations(self.config.limits, known, "monitor")  # raises for an unknown name
            except Exception as error:  # anybody may have made the file
                failures[file.recipe] = error
                continue
            self.logs = self.logs or [FigureLog(logger) for logger in loggers]
            self.suite, self.key, self.recipe = suite, suite.key, file.recipe
            self.done = self._done()
            return
        if failures:  # a mistake in the options fails with every recipe
            raise next(iter(failures.values()))

    def evaluate(self, file: CheckpointFile) -> None:
        """Evaluate, judge and record a checkpoint; any exception of it is an event `broken`."""
        earlier = list(self.history.events("evaluated"))
        # Over all suites, so that a model evaluated by a new suite counts as deployed later.
        position = len(earlier) if self.config.is_single else file.step
        facts = file.facts | {"suite": self.key, "position": position}
        self.folder.in_evaluation = file.identity
        try:
            results = self.results(file)
            event = facts | {"event": "evaluated", "date": timestamp()}
            current = current_results(file.name, position, results)
            # Before its scores are written, which may take the place of an earlier evaluation's.
            event |= judged(self.config, self.history, self.key, current)
            about = {name: facts[name] for name in ("suite", "weights", "recipe")}
            lines = []
            for result, scores in results:
                key = cache_key(name=result.name, **about)
                self.history.scores.write(key, scores)
                details = result.details | {"reuse": self.history.scores.reference(key)}
                record = replace(result, details=details).record()
                lines.append(record | facts | {"stage": "monitor"})
        except Replaced:
            return  # the next look finds its successor
        except Unreachable:
            raise
        except Exception as error:  # of any kind: the other checkpoints are evaluated
            self.recipe = None  # the next one gets a module of its own
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            lines, event = [], facts | broken_event(file.name, _reason(error))
        finally:
            self.folder.in_evaluation = None
        self.record(*lines, event)
        self.done = self._done()

    def results(self, file: CheckpointFile) -> list[tuple[Result, Scores]]:
        assert self.suite is not None
        if file.recipe != self.recipe:
            self.suite.module = self.built(file).model
            self.recipe = file.recipe
        load_weights(self.suite.module, self.folder.read(file))

        def look_in_time() -> None:
            # An evaluation may last longer than a file is there; the next step reports errors.
            if monotonic() - (self.looked_at or 0.0) >= self.config.every:
                self.looked_at = monotonic()
                with suppress(Unreachable):
                    self.look()

        return self.suite.evaluate(look_in_time)

    def record(self, *lines: Fields) -> None:
        event = lines[-1] | self.outbox.mark(lines[-1])
        lines = (*lines[:-1], event)
        self.history.append(*lines)
        self.display.show(lines)
        # Logged at the next look, after the notifications.
        for log in self.logs:
            log.add(lines)

    def finish(self) -> None:
        """Record the exit code: 1 after an alarm since the last end, else 0."""
        if not self.history.lines:
            raise ValueError(
                f"there is no checkpoint in {self.config.run}: *.ckpt or checkpoints/**/*.ckpt"
            )
        # The last checkpoint is judged by the current options, however old its evaluation is.
        found = final_alarms(self.config, self.history, self.key)
        code = int(bool(found or self.history.unreported()))
        self.record({"event": "ended", "date": timestamp(), "alarm": found, "code": code})
        self.code = code


def _reason(error: Exception) -> str:
    """Return the reason without the class of an error that explains itself."""
    reason = reason_of(error)
    if "state_dict" in reason:
        return "it is of another architecture than the model"
    explained = isinstance(error, InputError | Fault | ValueError)
    return reason.removeprefix(f"{type(error).__name__}: ") if explained else reason
