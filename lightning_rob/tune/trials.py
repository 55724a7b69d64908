"""Trials, their record on disk, and the study that makes one after the other."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightning_rob.evaluation.records import versions
from lightning_rob.tune.search import Search, enough
from lightning_rob.tune.space import Point, Space

Evaluate = Callable[[int, Point], dict[str, float]]  # the metrics of so-manieth trial


@dataclass(frozen=True)
class Trial:
    """One training with values of its own.

    Args:
        number: from 0.
        values: of the variables.
        metrics: what it logged last.
        seconds: it took.
        objective: what is maximised; None if it failed.
        error: why it failed.
        versions: of what it was run with.
    """

    number: int
    values: Point
    metrics: dict[str, float]
    seconds: float
    objective: float | None = None
    error: str | None = None
    versions: dict[str, str] = field(default_factory=versions)


def attempt(evaluate: Evaluate, number: int, values: Point) -> Trial:
    """Make a trial; an exception becomes its error."""
    began, metrics, error = time.perf_counter(), {}, None
    try:
        metrics = evaluate(number, values)
    except Exception as reason:  # whatever values that nobody chose make a training do
        lines = str(reason).strip().splitlines() or [""]
        error = f"{type(reason).__name__}: {lines[0][:300]}"
    return Trial(number, values, metrics, time.perf_counter() - began, error=error)


def read_trials(path: Path) -> Iterator[tuple[str, Trial]]:
    """The trials of a file, each after its study's key; half a line, after a crash, is none."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            fields = json.loads(line)
            study, trial = fields.pop("study"), Trial(**fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        yield study, trial


class Record:
    """The trials of a study, in a file of one line each.

    Args:
        path: the file.
        study: a key for recipe and space, which must be those of the trials that are there.

    Raises:
        ValueError: they are of another study.
    """

    def __init__(self, path: Path, study: str) -> None:
        self.path = path
        self.study = study
        self.trials: dict[int, Trial] = {}
        for key, trial in read_trials(path):
            if key != study:
                raise ValueError(
                    f"{path} is of another recipe, space or seed: choose another --out, "
                    f"or learn from it with --warm_start {path}"
                )
            self.trials.setdefault(trial.number, trial)

    @property
    def ended(self) -> list[Trial]:
        """The trials by their number."""
        return [self.trials[number] for number in sorted(self.trials)]

    @property
    def best(self) -> Trial | None:
        """The first of the best."""
        found = [trial for trial in self.ended if trial.objective is not None]
        return max(found, key=lambda trial: trial.objective or 0.0) if found else None

    def add(self, trial: Trial) -> None:
        """Write a trial; when this returns it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"study": self.study, **asdict(trial)}).encode() + b"\n"
        with self.path.open("ab+") as file:
            if file.tell() and not _ends_a_line(file.fileno(), file.tell()):
                line = b"\n" + line  # end the line that a crash broke off
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.trials[trial.number] = trial


def _ends_a_line(file: int, size: int) -> bool:
    return os.pread(file, 1, size - 1) == b"\n"


@dataclass(frozen=True)
class Study:
    """Makes trials until there are enough.

    Args:
        space: what is searched.
        search: proposes.
        record: of the trials.
        evaluate: trains with the values, and returns the metrics.
        tell: called after each trial.
    """

    space: Space
    search: Search
    record: Record
    evaluate: Evaluate
    tell: Callable[[Trial], None] = lambda _: None

    def run(self) -> None:
        """One trial after the other.

        Raises:
            ValueError: a trial does not log the objective, or all of them fail.
        """
        while todo := self.next():
            self.take(attempt(self.evaluate, *todo))

    def next(self, pending: Sequence[tuple[int, Point]] = ()) -> tuple[int, Point] | None:
        """The number and the values of the next trial; None when there are enough.

        Raises:
            ValueError: all failed.
        """
        ended, budget = self.record.ended, self.search.budget
        objectives = [trial.objective for trial in ended]
        if len(ended) >= min(self.search.initial, budget.trials) and not any(
            trial.error is None for trial in ended
        ):
            raise ValueError(f"all {len(ended)} trials failed, the last by {ended[-1].error}")
        if enough(objectives, budget) or len(ended) + len(pending) >= budget.trials:
            return None
        taken = {*self.record.trials, *(number for number, _ in pending)}
        number = next(n for n in range(budget.trials) if n not in taken)
        known = [(trial.values, trial.objective) for trial in ended]
        return number, self.search.propose(number, known, [point for _, point in pending])

    def take(self, trial: Trial) -> None:
        """Judge a trial and record it.

        Raises:
            ValueError: it does not log the objective.
        """
        if trial.error is None:
            objective = self.space.score(trial.metrics)
            finite = math.isfinite(objective)
            error = None if finite else f"the objective is {objective}"
            trial = replace(trial, objective=objective if finite else None, error=error)
        self.record.add(trial)
        self.tell(trial)
