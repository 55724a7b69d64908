"""The search of `tune`: where to try next, the record of trials, and the study that runs them."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound

from lightning_rob.commands.tune.space import Budget, Point, Space
from lightning_rob.evaluation.records import versions
from lightning_rob.randomness import derive_seed
from lightning_rob.runtime.errors import reason_of
from lightning_rob.runtime.files import append_lines, read_json_lines

Observation = tuple[Point, float | None]  # None: the trial failed
Evaluate = Callable[[int, Point], dict[str, float]]  # metrics of a trial by number and values

KAPPA = 2.576  # default of the library, and of Ray Tune when the authors used it


@dataclass(frozen=True)
class Search:
    """Proposes points: the recipe's own, random ones, then the optimizer's."""

    space: Space
    own: Point  # the recipe's values, trial 0
    budget: Budget
    seed: int

    @property
    def initial(self) -> int:
        return 1 + self.budget.random

    def propose(
        self, number: int, trials: Sequence[Observation], pending: Sequence[Point] = ()
    ) -> Point:
        """Return the values of a trial; those that are running count as average until they end."""
        if number == 0:
            return self.own
        # A proposal depends on the seed, its number and the trials so far, not on interruptions.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Non-float parameters are experimental")
            optimizer = BayesianOptimization(
                None,
                dict(self.space.variables),
                UpperConfidenceBound(KAPPA),
                random_state=derive_seed(self.seed, number) % 2**32,
                verbose=0,
            )
        if number < self.initial:
            proposed: dict[str, Any] = optimizer.random_sample(1)[0]
        else:
            for point, objective in self.observations(trials, pending):
                optimizer.register(point, objective)
            proposed = optimizer.suggest()
        return {
            key: (round if len(bound) == 3 else float)(proposed[key])
            for key, bound in self.space.variables.items()
        }

    def observations(
        self, trials: Sequence[Observation], pending: Sequence[Point]
    ) -> list[tuple[Point, float]]:
        """Return each point within the bounds once, with its mean objective."""
        ended = [(point, o) for point, o in trials if o is not None]
        found = [objective for _, objective in ended] or [0.0]
        # A failed trial counts as the worst one: else its neighbourhood would be tried again.
        failed = ((point, min(found)) for point, o in trials if o is None)
        running = ((point, fmean(found)) for point in pending)
        places: dict[tuple[float, ...], list[float]] = {}
        for point, objective in chain(ended, failed, running):
            if self.space.contains(point):  # the recipe's own values may lie outside
                at = tuple(point[key] for key in self.space.variables)
                places.setdefault(at, []).append(objective)
        return [
            (dict(zip(self.space.variables, at, strict=True)), fmean(o)) for at, o in places.items()
        ]


@dataclass(frozen=True)
class Trial:
    """A training with its own values of the variables."""

    number: int  # from 0
    values: Point
    metrics: dict[str, float]  # the last logged ones
    seconds: float
    objective: float | None = None  # the maximized sum; None: it failed
    error: str | None = None
    versions: dict[str, str] = field(default_factory=versions)


def attempt(evaluate: Evaluate, number: int, values: Point) -> Trial:
    """Run a trial; an exception becomes its error."""
    began, metrics, error = time.perf_counter(), {}, None
    try:
        metrics = evaluate(number, values)
    except Exception as reason:  # extreme values may make a training fail in any way
        error = reason_of(reason)
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
    """The trials of a study, in a file with a line for each."""

    def __init__(self, path: Path, study: str) -> None:
        self.path = path
        self.study = study
        self.trials: dict[int, Trial] = {}
        for key, trial in read_trials(path):
            if key != study:
                raise ValueError(f"{path} is of another recipe, space or seed: give another --out")
            self.trials.setdefault(trial.number, trial)

    @property
    def ended(self) -> list[Trial]:
        return [self.trials[number] for number in sorted(self.trials)]

    @property
    def best(self) -> Trial | None:
        found = [trial for trial in self.ended if trial.objective is not None]
        return max(found, key=lambda trial: trial.objective or 0.0, default=None)

    def add(self, trial: Trial) -> None:
        """Append a trial; it is on the disk when this returns."""
        append_lines(self.path, [json.dumps({"study": self.study, **asdict(trial)})])
        self.trials[trial.number] = trial


@dataclass(frozen=True)
class Study:
    """Runs trials until the budget or the patience is exhausted; `report` is called after each."""

    search: Search
    record: Record
    evaluate: Evaluate
    report: Callable[[Trial], None] = lambda _: None

    def run(self) -> None:
        self._collect()
        while proposals := self.next():
            self.add(attempt(self.evaluate, *proposals[0]))

    def run_rounds(self, size: int, start: Callable[[], Sequence[str]]) -> None:
        """Run `size` trials at a time.

        `start` has a process each do `run_part`, and returns for each why it failed.
        """
        self._collect()
        while proposals := self.next(size):
            for proposal, problem in zip(proposals, start(), strict=False):
                failed = Trial(*proposal, {}, 0.0, error=problem)
                self.add(next(self._ended_parts(*proposal), failed))

    def run_part(self, place: int, size: int) -> None:
        """Run the trial at a place, from 1, of the next round, and leave it to `run_rounds`."""
        # The record does not change within a round, so that all parts see the same proposals.
        for proposal in self.next(size)[place - 1 : place]:
            if not any(self._ended_parts(*proposal)):
                trial = attempt(self.evaluate, *proposal)
                Record(self._path_of_part(trial.number), self.record.study).add(trial)

    def _collect(self) -> None:
        """Add the trials that parts have left, which ran with values of their own."""
        for path in sorted((self.record.path.parent / "trials").glob("*/trial.jsonl")):
            for key, trial in read_trials(path):
                if key == self.record.study and trial.number not in self.record.trials:
                    self.add(trial)

    def _path_of_part(self, number: int) -> Path:
        return self.record.path.parent / "trials" / f"{number:04}" / "trial.jsonl"

    def _ended_parts(self, number: int, values: Point) -> Iterator[Trial]:
        """Yield what processes have left of a trial."""
        for key, trial in read_trials(self._path_of_part(number)):
            if key == self.record.study and trial.values == values:
                yield trial

    def next(self, size: int = 1) -> list[tuple[int, Point]]:
        """Return number and values of the next trials, at most `size`; none at the end."""
        ended, budget = self.record.ended, self.search.budget
        enough = len(ended) >= min(self.search.initial, budget.trials)
        if enough and all(trial.error is not None for trial in ended):
            raise ValueError(f"all {len(ended)} trials failed, the last by {ended[-1].error}")
        known = [(trial.values, trial.objective) for trial in ended]
        if budget.is_finished([objective for _, objective in known]):
            return []
        # A trial that was lost with its process leaves a gap, which is filled first.
        missing = [n for n in range(budget.trials) if n not in self.record.trials]
        proposals: dict[int, Point] = {}
        for number in missing[:size]:
            proposals[number] = self.search.propose(number, known, [*proposals.values()])
        return [*proposals.items()]

    def add(self, trial: Trial) -> None:
        if trial.error is None:
            try:
                objective = self.search.space.score(trial.metrics)
            except ValueError as reason:
                if self.record.best is None:
                    raise  # it is not a matter of this trial's values
                trial = replace(trial, error=str(reason))
            else:
                if math.isfinite(objective):
                    trial = replace(trial, objective=objective)
                else:
                    trial = replace(trial, error=f"the objective is {objective}")
        self.record.add(trial)
        self.report(trial)
