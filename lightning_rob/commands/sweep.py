"""`lightning-rob sweep`: evaluate a checkpoint once for each value of a variable."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import walk
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.measurement import Measurement, measure
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.commands.base import Run, without_reporting
from lightning_rob.commands.configs import SweepConfig
from lightning_rob.commands.scores import ScoreFiles, Scores, scores_by_name
from lightning_rob.commands.sweep_table import Row, SweepTable
from lightning_rob.commands.sweep_values import Value
from lightning_rob.commands.sweep_variables import VARIABLES, Variable
from lightning_rob.defenses import Defense
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.records import Result, append_records, measured, versions
from lightning_rob.evaluation.results import WORST
from lightning_rob.runtime.errors import Fault, visible
from lightning_rob.runtime.files import read_json_lines
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import CLEAN

RECORD, SCORES = "sweep.jsonl", "sweep_scores"
MEASURED = ("random", "private_draws", "interval_covers")  # details known after the evaluation


def run(config: SweepConfig, run: Run) -> None:
    """Sweep, print the table, and write record, table and figure.

    Raises:
        ValueError: the variable does not fit the attacks or the defense.
        Fault: some values failed; table and figure have the others.
    """
    weights = fingerprint(run.defense)
    name = Path(run.checkpoint).stem if run.checkpoint else type(run.model).__name__
    folder = config.out or Path("sweeps") / f"{name}_{weights[:8]}_{config.over}"
    facts = {
        "command": run.command,
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "model": f"{type(run.model).__name__}, weights {weights}",
        "checkpoint": run.checkpoint or "none",
        "data": f"test images of {type(run.data).__name__}",
        "versions": ", ".join(f"{package} {v}" for package, v in versions().items()),
    }
    with without_reporting(run.trainer) as (callbacks, others):
        for callback in callbacks:
            callback.setup(run.trainer, run.model, "test")  # renames clashing attacks
        rows = measurement_plan(config, callbacks, run)
        sweep = Sweep(config, run, others, ResultCache(folder))
        table = sweep.measure(rows)
    if run.trainer.is_global_zero:
        SweepTable(config, table, facts).write(folder)
    if sweep.failures:
        named = "; ".join(f"{v.label}: {_reason(error)}" for v, error in sweep.failures.items())
        raise Fault(f"{len(sweep.failures)} of {len(rows)} values failed, {named}")


def _reason(error: Exception) -> str:
    """Return what kind of error it is, its first line and under which attack it came."""
    lines = [*str(error).strip().splitlines()[:1], *getattr(error, "__notes__", ())[:1]]
    return visible(f"{type(error).__name__}: {' '.join(lines)}")


@dataclass(frozen=True)
class Target:
    """Function of a defense that sets the variable and returns the part that `source` attacks."""

    variable: Variable
    value: float
    source: RobustEval

    def __call__(self, defense: Defense) -> Defense:
        """Return the attacked part of the changed defense."""
        return self.source.target(self.variable.defense(defense, self.value))

    def attacks(self) -> dict[str, Attack]:
        """Return the callback's attacks with the value."""
        named = self.source.attacks.items()
        return {name: self.variable.attack(attack, self.value) for name, attack in named}


@dataclass(frozen=True)
class Point:
    """A result and its per-image scores."""

    result: Result
    scores: Scores

    @property
    def key(self) -> str:
        """The key of all that the result depends on."""
        return str(self.result.details["reuse"]["key"])

    @property
    def place(self) -> tuple[str, str, str]:
        """Variable, value and key."""
        details = self.result.details
        return details["variable"], repr(float(details["value"])), self.key


@dataclass(frozen=True)
class Task:
    """An attack on a defense, one cell of the table.

    Args:
        name: of the attack, or "clean".
        attack: None for clean images.
        target: the attacked defense.
        details: for the record.
        key: of all that the result depends on.
    """

    name: str
    attack: Attack | None
    target: Target
    details: dict[str, Any]
    key: str

    @property
    def counts(self) -> bool:
        """Whether it counts in the worst case: an attack on the full defense."""
        return self.attack is not None and self.target.source.target is full_defense


PlanRow = tuple[Value, list[Task]]


def measurement_plan(
    config: SweepConfig, callbacks: Sequence[RobustEval], run: Run
) -> list[PlanRow]:
    """Return the tasks of each value.

    Raises:
        ValueError: the variable does not fit the attacks or the defense.
    """
    variable = VARIABLES[str(config.over)]
    attacks = [attack for callback in callbacks for attack in callback.attacks.values()]
    if not attacks:
        raise ValueError(
            "no attacks to sweep: add --trainer.callbacks+=callbacks/adaptive_pgd.yaml"
        )
    parts = [part for attack in attacks for part in walk(attack)]
    if not any(hasattr(part, variable.field or "threat") for part in parts):
        raise ValueError(f"no attack has {variable.field} to sweep over: add callbacks/arc.yaml")
    settings, rows = run.settings(), []
    for value in config.points:
        targets = [Target(variable, value.number, callback) for callback in callbacks]
        rows.append(
            (value, [t for target in targets for t in _tasks(config, target, run, settings)])
        )
    first = rows[0][1]
    names = [*dict.fromkeys(task.name for task in first)]
    names += [WORST] * (sum(task.counts for task in first) > 1)
    if config.best and config.best not in names:
        raise ValueError(f"choose --best from {', '.join(names)}, got {config.best!r}")
    return rows


def _tasks(
    config: SweepConfig, target: Target, run: Run, settings: dict[str, Any]
) -> Iterator[Task]:
    """Yield clean images, if the full defense is attacked, and every attack of a callback."""
    source = target.source
    shared = {
        "target": getattr(source.target, "__name__", repr(source.target)),
        **{name: value for name, value in source.settings.asdict().items() if value is not None},
        "max_images": source.settings.max_images,
    }
    depends = shared | settings | {"defense": fingerprint(target(source.defense_of(run.model)))}
    clean: dict[str, Attack | None] = {CLEAN: None} if source.target is full_defense else {}
    for name, attack in (clean | target.attacks()).items():
        specs = {}
        if attack:
            specs = {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
        place = {"variable": config.over, "value": target.value, "stage": "test"}
        details = place | specs | shared | {"versions": settings["versions"]}
        yield Task(name, attack, target, details, cache_key(name=name, **specs, **depends))


class ResultCache:
    """Recorded results by all that they depend on, so that none is measured twice.

    The file has a line for each value and attack. Lines that a crash broke off, and results whose
    scores are missing, are ignored.

    Args:
        folder: of the record.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.files = ScoreFiles(folder, SCORES)
        self.points: dict[str, Point] = {}
        self.places: set[tuple[str, str, str]] = set()
        for point in self._read():
            self._keep(point)

    def add(self, points: Sequence[Point], write: bool) -> None:
        """Keep results, and write each that the file lacks for its value.

        Args:
            points: the results.
            write: write files; False on all processes but one.
        """
        unique = {point.place: point for point in points}
        new = [point for place, point in unique.items() if place not in self.places]
        if write and new:
            for point in new:
                if point.key not in self.points:
                    self.files.write(point.key, point.scores)
            append_records(self.path, (point.result.record() for point in new))
        for point in new:
            self._keep(point)

    def _keep(self, point: Point) -> None:
        self.points.setdefault(point.key, point)
        self.places.add(point.place)

    def _read(self) -> Iterator[Point]:
        for fields in read_json_lines(self.path):
            try:
                if (scores := self.files.read(fields)) is not None:
                    point = Point(Result.from_record(fields), scores)
                    _ = point.place  # raises an error for a record of another kind
                    yield point
            except (ValueError, KeyError, TypeError, AttributeError):
                continue


@dataclass(frozen=True)
class Sweep:
    """Measures the results that the cache lacks, beside callbacks that do not report.

    A value that fails, for any reason, is one of `failures`; the others are measured.
    """

    config: SweepConfig
    run: Run
    others: Sequence[Callback]
    cache: ResultCache
    failures: dict[Value, Exception] = field(default_factory=dict)

    def measure(self, rows: Sequence[PlanRow]) -> dict[Value, Row]:
        """Return each value's results by name, and print each value's accuracies."""
        table: dict[Value, Row] = {}
        writes = self.run.trainer.is_global_zero
        for number, (value, tasks) in enumerate(rows, start=1):
            began = time.perf_counter()
            place = f"[{number}/{len(rows)}] {self.config.over} {value.label}"
            try:
                new = self._measured(tasks)
            except Exception as error:  # of any kind: the other values are measured
                self.failures[value] = error
                # Other processes would wait for this one, and all values have one cause.
                if self.run.trainer.world_size > 1 or len(self.failures) == len(rows):
                    raise next(iter(self.failures.values())) from None
                print(f"{place}: failed, {_reason(error)}")
                continue
            points = [self._point(task, new) for task in tasks]
            self.cache.add(points, writes)
            worst = worst_point(tasks, self.cache, self.run.defense.transductive)
            self.cache.add(worst, writes)
            row = table.setdefault(value, {})
            for point in (*points, *worst):
                row.setdefault(point.result.name, point.result)
            if writes:
                took = f"{time.perf_counter() - began:.0f} s" if new else "recorded"
                accuracies = ", ".join(f"{r.name} {r.accuracy:.1%}" for r in row.values())
                print(f"{place}: {accuracies} ({took})")
        return table

    def _measured(self, tasks: Sequence[Task]) -> dict[tuple[str, Target], Point]:
        """Measure the tasks that are not recorded, in one test for all callbacks."""
        missing = [task for task in tasks if task.key not in self.cache.points]
        measurements = {}
        for target in dict.fromkeys(task.target for task in missing):
            attacks = {t.name: t.attack for t in missing if t.target == target and t.attack}
            if not attacks:  # only clean images are missing, but an evaluation needs an attack
                attacks = dict([*target.attacks().items()][:1])
            measurements[target] = Measurement(
                attacks, target, target.source.settings, **target.source.inputs
            )
        if not measurements:
            return {}
        run = self.run
        results = measure(run.trainer, run.model, run.data, self.others, [*measurements.values()])
        return {
            (name, target): Point(result.measurement(name), scores)
            for target, result in zip(measurements, results, strict=True)
            for name, scores in scores_by_name(result).items()
        }

    def _point(self, task: Task, new: dict[tuple[str, Target], Point]) -> Point:
        """Return a task's result from an equal measurement, recorded or new."""
        source = self.cache.points.get(task.key) or new[task.name, task.target]
        own = {name: source.result.details[name] for name in MEASURED}
        details = task.details | own | {"reuse": self.cache.files.reference(task.key)}
        scores = source.scores[1]
        draws = scores if own["private_draws"] > 1 else None
        result = measured(task.name, scores.mean(1), source.result.seconds, details, draws)
        return Point(result, source.scores)


def worst_point(tasks: Sequence[Task], cache: ResultCache, joint: bool = False) -> list[Point]:
    """Return the result under the strongest attack on the full defense; none of a single attack.

    Like `RobustEval`'s it counts the clean image as well; see `worst_case`.

    Args:
        tasks: of one value.
        cache: has their results.
        joint: whether predictions depend on the whole batch (transductive defenses).
    """
    counted = [task for task in tasks if task.counts]
    if len(counted) < 2:
        return []
    clean = [task for task in tasks if task.attack is None]
    over = [cache.points[task.key] for task in (*clean, *counted)]
    tables = [(index, scores[:, None]) for index, scores in (point.scores for point in over)]
    random = any(point.result.details["random"] for point in over)
    found = worst_case(tables, random, joint)
    key = cache_key(name=WORST, over=[task.key for task in counted])
    last = over[-1].result.details
    details = {k: v for k, v in counted[0].details.items() if k not in ("attack", "threat")}
    details |= {name: last[name] for name in MEASURED}
    details |= found.details(index for index, _ in tables)
    details |= {"over": [task.name for task in counted]}
    details |= {"reuse": cache.files.reference(key)}
    draws = found.scores if last["private_draws"] > 1 else None
    result = measured(WORST, found.scores.mean(1), 0.0, details, draws)
    return [Point(result, (found.index, found.scores))]
