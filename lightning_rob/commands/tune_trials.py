"""The trials of `tune`: their record on disk, and the study that runs one after the other."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightning_rob.commands.tune_search import Point, Search, Space, is_finished
from lightning_rob.evaluation.records import versions
from lightning_rob.runtime.files import append_lines, read_json_lines

Evaluate = Callable[[int, Point], dict[str, float]]  # metrics of a trial by number and values


@dataclass(frozen=True)
class Trial:
    """A training with its own values of the variables.

    Args:
        number: from 0.
        values: of the variables.
        metrics: the last logged ones.
        seconds: duration.
        objective: the maximized sum; None if the trial failed.
        error: why it failed.
        versions: of the packages it ran with.
    """

    number: int
    values: Point
    metrics: dict[str, float]
    seconds: float
    objective: float | None = None
    error: str | None = None
    versions: dict[str, str] = field(default_factory=versions)


def attempt(evaluate: Evaluate, number: int, values: Point) -> Trial:
    """Run a trial; an exception becomes its error."""
    began, metrics, error = time.perf_counter(), {}, None
    try:
        metrics = evaluate(number, values)
    except Exception as reason:  # extreme values may make a training fail in any way
        lines = str(reason).strip().splitlines() or [""]
        error = f"{type(reason).__name__}: {lines[0][:300]}"
    return Trial(number, values, metrics, time.perf_counter() - began, error=error)


def read_trials(path: Path) -> Iterator[tuple[str, Trial]]:
    """Yield the trials of a file with their study's key; skip a line of another kind."""
    for content in read_json_lines(path):
        try:
            study, trial = content.pop("study"), Trial(**content)
        except (KeyError, TypeError):
            continue
        yield study, trial


class Record:
    """The trials of a study, in a file of one line each.

    Args:
        path: the file.
        study: a key of recipe and space, which must be that of the recorded trials.

    Raises:
        ValueError: the file is of another study.
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
        """The trials by number."""
        return [self.trials[number] for number in sorted(self.trials)]

    @property
    def best(self) -> Trial | None:
        """The first trial with the highest objective."""
        found = [trial for trial in self.ended if trial.objective is not None]
        return max(found, key=lambda trial: trial.objective or 0.0, default=None)

    def add(self, trial: Trial) -> None:
        """Append a trial; it is on the disk when this returns."""
        append_lines(self.path, [json.dumps({"study": self.study, **asdict(trial)})])
        self.trials[trial.number] = trial


@dataclass(frozen=True)
class Study:
    """Runs trials until the budget or the patience is exhausted.

    Args:
        space: judges a trial.
        search: proposes points.
        record: of the trials.
        evaluate: trains with the values, and returns the metrics.
        report: called after each trial.
    """

    space: Space
    search: Search
    record: Record
    evaluate: Evaluate
    report: Callable[[Trial], None] = lambda _: None

    def run(self) -> None:
        """Run one trial after the other.

        Raises:
            ValueError: a trial does not log the objective, or all of them fail.
        """
        while proposal := self.next():
            self.add(attempt(self.evaluate, *proposal))

    def next(self, pending: Sequence[tuple[int, Point]] = ()) -> tuple[int, Point] | None:
        """Return number and values of the next trial; None when the study is finished.

        Raises:
            ValueError: all trials failed.
        """
        ended, budget, running = self.record.ended, self.search.budget, dict(pending)
        enough = len(ended) >= min(self.search.initial, budget.trials)
        if enough and all(trial.error is not None for trial in ended):
            raise ValueError(f"all {len(ended)} trials failed, the last by {ended[-1].error}")
        known = [(trial.values, trial.objective) for trial in ended]
        if is_finished([o for _, o in known], budget) or len(ended) + len(running) >= budget.trials:
            return None
        taken = {*self.record.trials, *running}
        number = next(n for n in range(budget.trials) if n not in taken)
        return number, self.search.propose(number, known, [*running.values()])

    def add(self, trial: Trial) -> None:
        """Score a trial and record it.

        Raises:
            ValueError: it does not log the objective, and no earlier one did.
        """
        trial = self._scored(trial) if trial.error is None else trial
        self.record.add(trial)
        self.report(trial)

    def _scored(self, trial: Trial) -> Trial:
        """Return a trial with its objective, or why it has none."""
        try:
            objective = self.space.score(trial.metrics)
        except ValueError as reason:
            if self.record.best is None:
                raise  # it is not a matter of this trial's values
            return replace(trial, error=str(reason))
        if math.isfinite(objective):
            return replace(trial, objective=objective)
        return replace(trial, error=f"the objective is {objective}")
