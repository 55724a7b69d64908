"""Takes the checkpoints of a source one by one, and evaluates each by the same suite."""

import errno
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from lightning_rob.commands.base import Run, quiet_lightning, without_reporting
from lightning_rob.commands.checkpoints import load_weights, read_checkpoint
from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.bucket import Bucket
from lightning_rob.commands.monitor.comparison import (
    current_results,
    final_alarms,
    judged,
    last_results,
    times_judged,
    worst_of,
)
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.folder import (
    FACTS,
    CheckpointFile,
    CheckpointFolder,
    broken_event,
)
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    identity,
    seconds_of,
    tag,
    timestamp,
)
from lightning_rob.commands.monitor.notify import PATIENCE
from lightning_rob.commands.monitor.publisher import Publisher
from lightning_rob.commands.monitor.recorder import Recorder
from lightning_rob.commands.monitor.registry import RegisteredModel
from lightning_rob.commands.monitor.snapshot import Snapshot, newest_first, newest_group
from lightning_rob.commands.monitor.source import LocalFolder, Source, Version
from lightning_rob.commands.monitor.suite import PeriodicAction, Suite, SuiteFiles
from lightning_rob.commands.scores import Scores
from lightning_rob.commands.thresholds import violations
from lightning_rob.errors import Fault, InputError
from lightning_rob.evaluation.records import SESSION, Result
from lightning_rob.files import UNWRITABLE, raise_thread_errors
from lightning_rob.identity import cache_key

NICE = 10

CACHE = "monitor_cache"  # in the folder of the history, for remote checkpoints

Steps = Generator[float, None, int]  # yields the seconds until the next; returns the exit code
Build = Callable[[Path], Run]  # checkpoint -> module, data and trainer by its recipe
Results = list[tuple[Result, Scores]]


def run(config: MonitorConfig, build: Build) -> None:
    """Follow the checkpoints until one of the ends that the options name.

    Raises:
        ValueError: there is no checkpoint, or the attacks do not fit.
        InputError: the history cannot be written, or the checkpoints cannot be read.
        SystemExit: with code 1 after an alarm.
    """
    lower_priority()
    code: int | None = None
    try:
        with raise_thread_errors(), quiet_lightning(), closing(watched(config, build)) as steps:
            code = _completed(steps)
    except OSError as error:
        if code is None or error.errno not in UNWRITABLE:
            raise  # else only the curves' thread failed; the next start writes them anew
    if code:
        raise SystemExit(code)


def lower_priority() -> None:
    """Leave the processor to the training."""
    if hasattr(os, "setpriority"):  # not on Windows
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, NICE))


def _completed(steps: Steps) -> int:
    """Take all steps of a monitor, and return its exit code."""
    while True:
        try:
            seconds = next(steps)
        except StopIteration as end:
            return int(end.value)
        if seconds:
            time.sleep(seconds)


def watched(
    config: MonitorConfig,
    build: Build,
    publisher: Publisher | None = None,
    goes_on: bool = False,
) -> Steps:
    """Evaluate all checkpoints that appear.

    Args:
        config: options.
        build: builds the run of a checkpoint.
        publisher: shared with other monitors; None for one of its own.
        goes_on: after a failure that is not of a single checkpoint, which becomes an alarm.

    Yields:
        The seconds until the next look.

    Returns:
        The exit code.
    """
    try:
        with closing(History(config.home)) as history:
            return (yield from _watch(Watcher(config, history, build, publisher, goes_on)))
    except OSError as error:
        if error.errno not in (*UNWRITABLE, errno.ENOTDIR, errno.EEXIST, errno.EACCES):
            raise  # for example, images that cannot be read
        raise InputError(f"the history cannot be written: {error}; see --out") from error


def _watch(watcher: "Watcher") -> Steps:
    """Evaluate all checkpoints that appear, and return the exit code."""
    patience = 0.0
    label = f"{watcher.config.label}: " if watcher.config.label else ""
    warn(f"{label}watching {watcher.config.run}; the history is {watcher.history.path}")
    try:
        yield from watcher.follow()
        if not watcher.history.lines:
            raise ValueError(f"there is no checkpoint in {watcher.config.run}")
        code, patience = watcher.end(), PATIENCE
        return code
    finally:
        watcher.close(patience)


def open_source(config: MonitorConfig) -> Source:
    """Return the source of the checkpoints that the options name.

    Raises:
        Unreachable: it cannot be opened.
    """
    if config.url is None:
        return LocalFolder(config.folder, config.file)
    kind = RegisteredModel if config.url.startswith("mlflow:") else Bucket
    return kind(config.url, config.home / CACHE)


class UnusableCheckpoint(Exception):
    """A checkpoint that cannot be evaluated, while others can."""


class Watcher:
    """Evaluates the checkpoints of a folder, and records the results in the history."""

    def __init__(
        self,
        config: MonitorConfig,
        history: History,
        build: Build,
        publisher: Publisher | None = None,
        goes_on: bool = False,
    ) -> None:
        source = open_source(config)  # first: a failure must leave no thread of the others behind
        self.config = config
        self.goes_on = goes_on
        self.history = history
        self.build = build
        self.publisher, self.owns_publisher = publisher or Publisher(config), publisher is None
        self.record = Recorder(config, history)
        self.record.waited = self.publish
        self.folder = CheckpointFolder(source, history, self.record)
        self.looked = False  # whether the source could be listed since the start
        self.suite: Suite | None = None
        self.suite_files = SuiteFiles(config.suite or ())
        self.outdated = False  # whether the suite is to be built anew
        self.suite_broken = False  # whether its files are, while the former suite is in use
        self.built_at = 0.0
        self.done: set[Identity] = set()
        self.current_recipe: str | None = None  # of the suite's module
        self.unfetched: set[Version] = set()  # reported: they could not be fetched again

    @property
    def key(self) -> str:
        """The key of the suite."""
        return self.suite.key if self.suite else ""

    def next_file(self) -> Generator[float, None, CheckpointFile | None]:
        """Wait for the next checkpoint that is not done; return None at the end."""
        while not (self.config.stop_at_alarm and self.history.unreported()):
            over = self.record.is_over
            left = self.record.left
            self.look()
            self._renew_suite()
            pending, unsettled = self.pending(), bool(self.folder.incomplete)
            self._judge_deferred(pending)
            waiting = unsettled or bool(self.folder.unread)
            if left <= 0 and (count := len(pending) + len(self.folder.unread)):
                warn(f"time is up, {count} checkpoints were not evaluated: run it again")
            if not pending:
                self._end_broken_suite()
            if left <= 0 or (over and not pending and not waiting):
                return None
            if ready := self._ready(pending):
                # The first one decides on the attacks; after it the newest counts most.
                newest = self.suite and not self.config.once
                if file := self._fetched(ready[::-1] if newest else ready):
                    return file
            yield min(self._pause(unsettled), left)
        return None

    def _ready(self, pending: list[CheckpointFile]) -> list[CheckpointFile]:
        """Return the checkpoints that may be evaluated now.

        The first one, which is read for its attacks, follows newer ones that are not read yet.
        """
        if self.suite and self.folder.unread and not self.folder.unreachable:
            return [file for file in pending if file != self.folder.first]
        return pending

    def _fetched(self, files: Sequence[CheckpointFile]) -> CheckpointFile | None:
        """Return the first checkpoint whose local file is there, fetched again if necessary.

        Raises:
            InputError: none can be fetched, and the monitor is about to end.
        """
        failures: dict[Version, InputError] = {}
        for file in files:
            try:
                if file.path.exists():
                    return file
            except InputError as error:
                failures[file.version] = error
                if file.version not in self.unfetched:
                    warn(f"{error}; trying again")
        self.unfetched |= failures.keys()
        if failures and self.record.is_over:
            raise next(iter(failures.values()))
        return None

    def _pause(self, unsettled: bool) -> float:
        """Return the seconds until the next look, while no checkpoint waits."""
        if self.folder.unread and not self.folder.unreachable:
            return 0.0
        return min(1.0, self.config.every) if unsettled else self.config.every

    def look(self) -> None:
        """Look for checkpoints, and publish the state, unless the source cannot be read.

        Raises:
            Unreachable: the source cannot be read, and it is the first look or the last.
        """
        before = self.folder.unreachable
        self.folder.scan(idle=not self._ready(self.pending()))
        if error := self.folder.unreachable:
            ending = self.record.is_over and self.folder.in_evaluation is None
            if ending or not self.looked:
                raise error
            if before is None:
                warn(f"{error}; trying again")
            return
        if before:
            warn(f"{self.config.run} can be read again")
        self.looked = True
        self.folder.forget(self.pending())
        self.publish()

    def publish(self) -> None:
        """Publish the state as metrics and as a page."""
        if self.publisher.wanted:
            group = newest_group(self.history, self.key, self._newest_first())
            waiting, writable = self.record.notifier.waiting, self.record.writable
            snapshot = Snapshot(group, self.history, len(self.pending()), waiting, writable)
            self.publisher.update(self.config.name, snapshot)

    def pending(self) -> list[CheckpointFile]:
        """Return the checkpoints that wait for an evaluation, in the order of training."""
        return self.folder.pending(self.done - self._due())

    def new_suite(self, first: CheckpointFile) -> Suite:
        """Build the suite by the recipe of a checkpoint.

        Raises:
            ValueError: the attacks do not fit, or a threshold is for an attack that it lacks.
            InputError: the checkpoint or its recipe cannot be read.
        """
        built = self.build(first.path)
        with without_reporting(built.trainer) as (evaluations, others):
            suite = Suite(built, evaluations, others)
        self.record.take_loggers(built.trainer)
        known = {tag(name): 1.0 for name in (*suite.names, "blind")}
        violations(self.config.minima, known, "monitor")  # raises it for an unknown name
        return suite

    def follow(self) -> Generator[float, None, None]:
        """Evaluate each checkpoint by the suite that the first one decides on.

        One of several monitors goes on after any failure, which is an alarm.
        """
        while True:
            try:
                yield from self._follow()
                return
            except Exception as error:
                if not self.goes_on or self.record.is_over or self.record.left <= 0:
                    raise
                self._record_failure(error)
            self.suite, self.done = None, set()
            yield self.config.every

    def _record_failure(self, error: Exception) -> None:
        """Record why a model cannot be evaluated at all, unless that is known."""
        reason = _reason(error)
        known = self.history.alarms().suite
        if known is None or not known["alarm"][0].endswith(reason):
            self.record(broken_event(self.config.name, reason) | {"part": "suite"})

    def _follow(self) -> Generator[float, None, None]:
        """Evaluate each checkpoint, until the end or a failure."""
        while (file := (yield from self.next_file())) is not None:
            if self.suite is None:
                self._build_suite([file, *self.pending()])
                continue  # without a suite, it was deleted before it was read: the next will do
            self.folder.in_evaluation = file.identity
            try:
                self._evaluate(file)
            finally:
                self.folder.in_evaluation = None
            self.done = self._done()
            self._end_broken_suite()
            yield 0.0  # another model may be next

    def _build_suite(self, files: Iterable[CheckpointFile]) -> None:
        """Adopt the suite of the first of these checkpoints whose recipe can be built.

        A mistake in the options fails with every recipe, one in a checkpoint with its own.

        Raises:
            Exception: that of the first recipe, if none can be built.
        """
        failures: dict[str, Exception] = {}
        for file in files:
            if file.recipe in failures:
                continue
            try:
                return self._adopt(self.new_suite(file), file)
            except Exception as error:  # of any kind: the file is of anybody's making
                if file.unchanged:
                    failures[file.recipe] = error
        if failures:
            raise next(iter(failures.values()))
        return None

    def _adopt(self, suite: Suite, first: CheckpointFile) -> None:
        self.suite, self.built_at = suite, time.time()
        self.current_recipe = first.recipe if first.unchanged else None
        self.outdated, self.done = False, self._done()
        self.suite_broken = False

    def _end_broken_suite(self) -> None:
        """Record that the suite is in use again, which ends its alarm."""
        if self.suite and not self.suite_broken and self.history.alarms().suite:
            self.record({"event": "restored", "date": timestamp(), "suite": self.key})

    def _renew_suite(self) -> None:
        """Build the suite anew when its files have changed or its images are to be read again.

        One that cannot be built is an alarm, and the former one stays in use.
        """
        if self.suite is None:
            return
        edited, old = self.suite_files.changed(), self._is_old(self.built_at)
        self.outdated |= edited or bool(old and self._due())
        if not self.outdated:
            return
        try:
            self._build_suite(sorted(self.folder.files.values(), key=lambda file: file.order))
        except Exception as error:  # of any kind: the checkpoints go on by the former suite
            self.outdated, self.built_at = False, time.time()
            self.suite_broken = True
            name = ", ".join(self.config.suite or ["the suite"])
            reason = f"{_reason(error)}; the former suite stays in use"
            self.record(broken_event(name, reason) | {"part": "suite"})

    @property
    def _period(self) -> float:
        """Seconds after which the newest checkpoint is evaluated again."""
        hours = self.config.reevaluate
        return float("inf") if hours is None else 3600 * hours

    def _is_old(self, date: float) -> bool:
        """Return whether a Unix time is a period ago, or, after the clock was set back, ahead."""
        return abs(time.time() - date) >= self._period

    def _newest_first(self) -> list[Identity]:
        steps = {file.identity: file.step for file in self.folder.files.values()}
        return newest_first(steps, self.history)

    def _due(self) -> set[Identity]:
        """Return the newest checkpoint if it is time to evaluate it again."""
        if self.config.reevaluate is None:
            return set()
        newest = next(iter(self._newest_first()), None)
        dates = [
            event["date"]
            for event in self.history.events("evaluated")
            if event["suite"] == self.key and identity(event) == newest
        ]
        due = bool(dates) and self._is_old(seconds_of(dates[-1]))
        return {newest} if newest and due else set()

    def _done(self) -> set[Identity]:
        """Return the checkpoints that need no evaluation by this suite.

        One whose scores are missing is evaluated again, for later ones are compared with it. Of a
        single file only the last evaluation counts: an earlier model may be deployed again.
        """
        done = [
            identity(event)
            for *results, event in self.history.groups()
            if event.get("suite") == self.key
            and event["event"] in ("evaluated", "broken")
            and (event["event"] == "broken" or self.history.has_scores(worst_of(results)))
        ]
        return set(done[-1:] if self.config.is_single else done)

    def _evaluate(self, file: CheckpointFile) -> None:
        """Evaluate and record a checkpoint, unless it is gone or unusable."""
        earlier = list(self.history.events("evaluated"))
        again = [e for e in earlier if (e["suite"], *identity(e)) == (self.key, *file.identity)]
        repeat = len(again)
        # Counted over all suites: an alarm by a former suite ends with the next one without alarm.
        position = len(earlier) if self.config.is_single else file.step
        facts = self.folder.facts(file) | {"suite": self.key, "position": position}
        try:
            results = self._results(file)
        except UnusableCheckpoint as error:
            self.record(facts | broken_event(facts["checkpoint"], str(error)))
            return
        if results:
            previous = list(last_results(self.history, self.key).values())
            current = current_results(facts["checkpoint"], position, results)
            event = facts | {"event": "evaluated", "date": timestamp(), "session": SESSION}
            event |= judged(self.config, current, previous, times_judged(self.history))
            event |= {"deferred": True} if self._has_older(file) else {}
            lines = [self._line(*each, facts, repeat) for each in results]
            self.record(*lines, event)

    def _has_older(self, file: CheckpointFile) -> bool:
        """Return whether an older checkpoint waits, with which this one is to be compared."""
        unread = bool(self.folder.unread) and not self.config.is_single
        return unread or any(other.step < file.step for other in self.pending())

    def _judge_deferred(self, pending: Sequence[CheckpointFile]) -> None:
        """Compare checkpoints that were evaluated before older ones with these, once all are there.

        Alarms of the first comparison, with those that were there, are not repeated.
        """
        if self.folder.unread:
            return
        judgements = [e for e in self.history.events("judged") if e["suite"] == self.key]
        known = set(map(identity, judgements))
        deferred = [
            event
            for event in self.history.events("evaluated")
            if event["suite"] == self.key and event.get("deferred") and identity(event) not in known
        ]
        oldest = min((file.step for file in pending), default=math.inf)
        ready = [event for event in deferred if event["step"] <= oldest]
        for event in sorted(ready, key=lambda event: event["step"]):
            results = last_results(self.history, self.key)  # with the fall of the one before
            if current := results.get(identity(event)):
                previous = [other for other in results.values() if other is not current]
                fields = judged(self.config, current, previous, times_judged(self.history))
                fields["alarm"] = [a for a in fields["alarm"] if a not in event["alarm"]]
                facts = {name: event[name] for name in ("checkpoint", "suite", "position", *FACTS)}
                about = {"event": "judged", "date": timestamp(), "alarmed": bool(event["alarm"])}
                self.record(facts | about | fields)

    def _line(self, result: Result, scores: Scores, facts: Fields, repeat: int) -> Fields:
        """Write the scores of a result, and return its line; repeated ones get other files."""
        again = {"repeat": repeat} if repeat else {}
        names = ("suite", "weights", "recipe")
        key = cache_key(name=result.name, **{k: facts[k] for k in names}, **again)
        self.record.when_writable(lambda: self.history.scores.write(key, scores))
        details = result.details | {"reuse": self.history.scores.reference(key)}
        return replace(result, details=details).record() | facts | {"stage": "monitor"}

    def _results(self, file: CheckpointFile) -> Results:
        """Return a checkpoint's results; none if the file has changed.

        Raises:
            UnusableCheckpoint: it cannot be loaded or evaluated, for any reason.
            OSError: the disk of the history is full.
        """
        assert self.suite is not None
        try:
            if not self._load(file):
                return []
            return self.suite.evaluate(PeriodicAction(self.look, self.config.every))
        except Exception as error:  # of any kind: the others are evaluated
            self.current_recipe = None  # the next one gets a module of its own
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            raise UnusableCheckpoint(_reason(error)) from error

    def _load(self, file: CheckpointFile) -> bool:
        """Give the suite the module and weights of a checkpoint; False if it has changed."""
        assert self.suite is not None
        try:
            if file.recipe != self.current_recipe:
                self.suite.replace_module(self.build(file.path).model)
                self.current_recipe = file.recipe
            load_weights(self.suite.module, read_checkpoint(str(file.path)))
        except Exception:
            if file.unchanged:
                raise
        if not file.unchanged:
            self.current_recipe = None  # the module may be that of the new file
            return False
        return True

    def end(self) -> int:
        """Return and record the exit code: 1 after an alarm since the last end, else 0.

        The last checkpoint is judged by the current options, however old its evaluation is.
        """
        alarmed = bool(self.history.unreported())
        last = list(last_results(self.history, self.key).values())
        found = [] if alarmed else final_alarms(self.config, last)
        code = int(alarmed or bool(found))
        self.record({"event": "ended", "date": timestamp(), "alarm": found, "code": code})
        return code

    def close(self, patience: float) -> None:
        """End; wait `patience` seconds for the receivers of notifications."""
        self.record.close(patience)
        self.publish()
        if self.owns_publisher:
            self.publisher.close()


def _reason(error: Exception) -> str:
    """Return an error's first line; for weights of another architecture, a short reason."""
    first = next(iter(str(error).strip().splitlines()), "")
    first = " ".join([first, *getattr(error, "__notes__", ())[:1]]).strip()
    if "state_dict" in first:
        return "it is of another architecture than the model"
    if isinstance(error, InputError | Fault | ValueError) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
