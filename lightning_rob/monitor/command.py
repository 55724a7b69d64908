"""`lightning-rob monitor`: what `test` would evaluate, for each checkpoint as it appears."""

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_rob.cli.checkpoints import load_weights, read_checkpoint
from lightning_rob.cli.configs import read_config
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.cli.plugins import spell_out
from lightning_rob.errors import Fault, InputError
from lightning_rob.evaluation.records import SESSION, Result
from lightning_rob.monitor.board import Board
from lightning_rob.monitor.change import (
    alarms,
    change,
    drops,
    last_before,
    pasts,
    present,
    today,
)
from lightning_rob.monitor.folder import Folder, Sighting, broken, stamp_of
from lightning_rob.monitor.history import RECORD, Fields, History, identity, now, tag
from lightning_rob.monitor.options import Watch, parse
from lightning_rob.monitor.screen import Screen
from lightning_rob.monitor.suite import Meanwhile, Suite
from lightning_rob.sweep.command import settings
from lightning_rob.sweep.measure import bare
from lightning_rob.thresholds import violations

NICE = 10
LOADING_ERRORS = (InputError, RuntimeError, ValueError, KeyError, TypeError)


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `monitor`.

    Raises:
        InputError: what is asked for cannot be run.
        SystemExit: with code 1 after an alarm.
    """
    _give_way()
    try:
        watch, rest = parse(args)
        with History(watch.out / RECORD) as history:
            code = _follow(Watcher(watch, history), rest)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"the history cannot be written: {error}; see --out") from error
    if code:
        raise SystemExit(code)


def _give_way() -> None:
    """Take what time the training leaves."""
    if hasattr(os, "setpriority"):  # not on Windows
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, NICE))


def _follow(watcher: "Watcher", rest: Sequence[str]) -> int:
    """Evaluate all that comes, and return the exit code."""
    try:
        while (first := watcher.next(())) is not None:
            try:
                MonitorCommand(watcher, first, rest)
                break
            except InputError:
                if watcher.suite or first.path.exists():
                    raise  # else it went before it was read: the next one will do
        if not watcher.history.lines:
            raise ValueError(f"there is no checkpoint in {watcher.watch.folder}")
        return watcher.end()
    finally:
        watcher.board.close()


class Unfit(Exception):
    """A checkpoint that cannot be evaluated, while others can."""


class MonitorCommand(RobustCLI):
    """Builds what `test` would run, and runs it for every checkpoint.

    Args:
        watcher: knows the checkpoints.
        first: that of which model and data are built.
        rest: a command line of `test`, without the subcommand.
    """

    def __init__(self, watcher: "Watcher", first: Sighting, rest: Sequence[str]) -> None:
        self.watcher, self.first, self.rest = watcher, first, rest
        super().__init__(_test_of(first.path, rest))

    def test(self, model: Any, datamodule: LightningDataModule, **_: Any) -> None:
        """Follow the folder where `test` would be run."""
        told = settings(self)
        # Each line has the versions: others are no reason to begin anew, nor is another recipe in
        # the checkpoint that happens to be the first, unless the command line changes recipes.
        del told["versions"]
        changes = _changes(spell_out(self.rest))
        told["model"] = [type(model).__name__, changes, told["model"] if changes else None]
        if model.defense.transductive:
            told["round"] = getattr(datamodule, "eval_batch_size", None)
        with bare(self.trainer) as (evaluations, others):
            suite = Suite(self.trainer, model, datamodule, evaluations, others, told)
            self.watcher.follow(suite, self.first, self.rebuilt)

    def rebuilt(self, path: Path) -> Any:
        """The model of another checkpoint, by its own recipe.

        Raises:
            InputError: it cannot be built.
        """
        return ModelOf(_test_of(path, self.rest)).model


class ModelOf(RobustCLI):
    """Builds what `test` would run, and does not run it."""

    def test(self, **_: Any) -> None:
        """Nothing."""

    def after_test(self) -> None:
        """Nothing: there are no figures."""


def _test_of(path: Path, rest: Sequence[str]) -> list[str]:
    """The command line of `test` for a checkpoint."""
    own = ["--ckpt_path", str(path), "--trainer.devices=1", "--trainer.logger=false"]
    return ["test", *own, *rest]


class Watcher:
    """Takes the checkpoints of a folder one by one.

    Args:
        watch: what is asked for.
        history: what is known of them.
    """

    def __init__(self, watch: Watch, history: History) -> None:
        self.watch = watch
        self.history = history
        self.screen = Screen()
        self.board = Board(watch.out / "monitor", history.lines)
        self.folder = Folder(watch.folder, history, self.tell)
        self.began = time.monotonic()
        self.suite = ""
        self.recipe: str | None = None  # that the suite's model was built by

    def tell(self, *lines: Fields) -> None:
        """Record lines, the last of which is an event, and show them."""
        self.history.append(*lines)
        self.board.show(lines)
        self.screen.show(lines)

    def next(self, done: Collection[tuple[str | None, str | None]]) -> Sighting | None:
        """The next checkpoint whose identity is not done, when it is there; None at the end."""
        while not (self.watch.stop_at_alarm and self.history.unreported()):
            left, over = self._time_left(), self.watch.until and self.watch.until.exists()
            self.folder.look()
            waiting = self.folder.waiting(done)
            if left <= 0:
                if waiting:
                    text = f"time is up, {len(waiting)} checkpoints were not evaluated"
                    print(f"lightning-rob: {text}: run it again", file=sys.stderr)
                return None
            if waiting:
                return waiting[0]
            if (self.watch.once or over) and not self.folder.unsettled:
                return None
            soon = 1.0 if self.folder.unsettled else self.watch.every
            time.sleep(min(soon, left, self.watch.every))
        return None

    def _time_left(self) -> float:
        if self.watch.seconds is None:
            return float("inf")
        return self.began + self.watch.seconds - time.monotonic()

    def follow(self, suite: Suite, first: Sighting, build: Callable[[Path], Any]) -> None:
        """Put each checkpoint to the suite.

        Args:
            suite: with the model of the first checkpoint.
            first: that checkpoint.
            build: makes the model of another one.

        Raises:
            ValueError: an alarm on a figure that the suite has not.
        """
        violations(self.watch.floors, {tag(name): 1.0 for name in suite.names}, "monitor")
        self.suite, self.build, self.first = suite.key, build, first.recipe
        self.recipe = first.recipe if stamp_of(first.path) == first.stamp else None
        while (sighting := self.next(self._done())) is not None:
            self.folder.busy = sighting.identity
            try:
                self._take(sighting, suite)
            finally:
                self.folder.busy = None

    def _done(self) -> set[tuple[str | None, str | None]]:
        """What needs no evaluation by this suite."""
        events = self.history.events("evaluated", "broken")
        return {identity(line) for line in events if line.get("suite") == self.suite}

    def _take(self, sighting: Sighting, suite: Suite) -> None:
        """Evaluate a checkpoint, unless it is gone or cannot be."""
        facts = self.folder.facts(sighting) | {"suite": suite.key}
        try:
            results = self._results(sighting, suite)
        except Unfit as error:
            self.tell(facts | broken(facts["checkpoint"], str(error)))
            return
        if results:
            self.tell(*(_line(result, facts) for result in results), self._event(facts, results))

    def _results(self, sighting: Sighting, suite: Suite) -> list[Result]:
        """A checkpoint's figures; none if it is no longer what was seen.

        Raises:
            Unfit: its weights are not those of the model, or not finite, or its recipe is of a
                model that cannot be built or attacked.
        """
        try:
            self._equip(sighting, suite)
            load_weights(suite.module, read_checkpoint(str(sighting.path)))
        except LOADING_ERRORS as error:
            if stamp_of(sighting.path) == sighting.stamp:
                raise Unfit(_reason(error)) from error
        if stamp_of(sighting.path) != sighting.stamp:
            self.recipe = None  # the model may be that of the file that has come
            return []
        try:
            return suite(Meanwhile(self.folder.look, self.watch.every))
        except Fault as error:
            raise Unfit(str(error)) from error
        except ValueError as error:
            if sighting.recipe == self.first:
                raise  # the attacks are wrong, not the checkpoint
            raise Unfit(f"the model of its recipe: {error}") from error

    def _equip(self, sighting: Sighting, suite: Suite) -> None:
        """Give the suite the model of a checkpoint's own recipe."""
        if sighting.recipe != self.recipe:
            suite.take(self.build(sighting.path))
            self.recipe = sighting.recipe

    def _event(self, facts: Fields, results: Sequence[Result]) -> Fields:
        """What there is to say of an evaluation beside its figures."""
        past = pasts(self.history, self.suite)
        current = present(facts["checkpoint"], facts["step"], results)
        before = last_before(past, current.step)
        changed: Fields = {"change": change(before, current).fields()} if before else {}
        found = drops(current, past)
        changed |= {"drops": [asdict(drop) for drop in found]} if found else {}
        told = {"date": now(), "session": SESSION, "alarm": alarms(self.watch, current, found)}
        return facts | {"event": "evaluated"} | changed | told

    def end(self) -> int:
        """Say by the exit code whether there was an alarm since the last end.

        The last checkpoint is judged by the limits of today, whenever it was evaluated.
        """
        alarmed = bool(self.history.unreported())
        for text in () if alarmed else today(self.watch, pasts(self.history, self.suite)):
            self.screen.warn(f"alarm: {text}")
            alarmed = True
        self.tell({"event": "ended", "date": now(), "code": int(alarmed)})
        return int(alarmed)


def _changes(args: Sequence[str]) -> list[tuple[str, Any]]:
    """What a command line changes in the model of a checkpoint: of a file its content."""
    found = []
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        name, sign, value = arg.partition("=")
        if re.match(r"--(model|config)\b|-c\b", name):
            content = _content(value if sign else following)
            whole = not name.startswith("--model") and isinstance(content, dict)
            if not whole or "model" in content:
                found.append((name, content["model"] if whole else content))
    return found


def _content(value: str) -> Any:
    """What a value says, or the file that it names."""
    names_one = value.endswith((".yaml", ".yml", ".json")) and os.path.isfile(value)
    return read_config(value) if names_one else value


def _line(result: Result, facts: Fields) -> Fields:
    """The line of a figure."""
    return result.record() | facts | {"stage": "monitor"}


def _reason(error: Exception) -> str:
    """An error's first line; of the many of `load_state_dict`, what they mean."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "it is of another architecture than the model" if "state_dict" in first else first
