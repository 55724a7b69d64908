"""`lightning-rob sweep`: attack a checkpoint once for each value of a variable."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import init_fields, map_attacks, walk
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.measurement import Measurement, measure
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.commands.base import Run, without_reporting
from lightning_rob.commands.scores import ScoreFiles, Scores, scores_by_name
from lightning_rob.commands.sweep import OF_DEFENSE, SweepConfig, Value
from lightning_rob.commands.sweep.table import Row, SweepTable
from lightning_rob.defenses import Defense, Ensemble
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
    """Sweep, print the table, and write record, table and figure."""
    weights = fingerprint(run.defense)
    name = Path(run.checkpoint).stem if run.checkpoint else type(run.model).__name__
    folder = config.out or Path("sweeps") / f"{name}_{weights[:8]}_{config.over}"
    with without_reporting(run.trainer) as (callbacks, others):
        for callback in callbacks:
            callback.setup(run.trainer, run.model, "test")  # renames clashing attacks
        plan = measurement_plan(config, callbacks, run)
        sweep = Sweep(config, run, others, ResultCache(folder))
        table = sweep.measure(config.own(plan))
    if run.trainer.is_global_zero and config.part is None:
        facts = {
            "command": run.command,
            "date": datetime.now().astimezone().isoformat(" ", "minutes"),
            "model": f"{type(run.model).__name__}, weights {weights}",
            "checkpoint": run.checkpoint or "none",
            "data": f"test images of {type(run.data).__name__}",
            "versions": ", ".join(f"{package} {v}" for package, v in versions().items()),
        }
        SweepTable(config, table, facts).write(folder)
    if sweep.failures:
        named = "; ".join(f"{v.label}: {_reason(error)}" for v, error in sweep.failures.items())
        raise Fault(f"{len(sweep.failures)} of {len(plan)} values failed, {named}")


def _reason(error: Exception) -> str:
    """Return the kind of an error, its first line and the attack that raised it."""
    lines = [*str(error).strip().splitlines()[:1], *getattr(error, "__notes__", ())[:1]]
    return visible(f"{type(error).__name__}: {' '.join(lines)}")


def with_value(attack: Attack, over: str, value: float) -> Attack:
    """Return the attack with another radius, or another count in all of its parts that have it."""
    if over == "eps":
        return attack.rescaled(value)
    return map_attacks(attack, lambda part: {over: int(value)} if over in init_fields(part) else {})


def changed(defense: Defense, over: str, value: float) -> Defense:
    """Return the ensemble whose first member has probability `value`, or of `value` members.

    The others keep their shares; a variable of the attack leaves the defense as it is.
    """
    if over not in OF_DEFENSE:
        return defense
    if not isinstance(defense, Ensemble):
        kind = type(defense).__name__
        raise ValueError(f"a sweep over probability or members needs an Ensemble, got {kind}")
    members, probs = defense.classifiers, defense.weights.double().cpu()
    if over == "probability":
        if len(probs) == 1 and value != 1:
            raise ValueError("a sweep over probability needs at least 2 members, got 1")
        # Where they have no probability, they share the rest equally.
        others = probs[1:] if probs[1:].sum() > 0 else torch.ones_like(probs[1:])
        rest = (1 - value) * others / others.sum()
        probs = torch.cat([torch.full_like(probs[:1], value), rest])
    else:
        if value > len(probs):
            raise ValueError(f"members must be 1 … {len(probs)}, all that there are, got {value:g}")
        members, first = members[: int(value)], probs[: int(value)]
        if not first.sum() > 0:
            raise ValueError(f"the first {value:g} members have no probability: {probs.tolist()}")
        probs = first / first.sum()
    found = Ensemble(members, probs, defense.rule, defense.rejects)
    return found.to(defense.weights.device)


@dataclass(frozen=True)
class Target:
    """Function of a defense that sets the variable and returns the part that `source` attacks."""

    over: str
    value: float
    source: RobustEval

    def __call__(self, defense: Defense) -> Defense:
        return self.source.target(changed(defense, self.over, self.value))

    def attacks(self) -> dict[str, Attack]:
        if self.over in OF_DEFENSE:
            return dict(self.source.attacks)
        return {n: with_value(a, self.over, self.value) for n, a in self.source.attacks.items()}


@dataclass(frozen=True)
class Task:
    """An attack on a defense, one cell of the table."""

    name: str
    attack: Attack | None  # None for clean images
    target: Target
    details: dict[str, Any]  # fields of the record
    key: str  # of all that the result depends on

    @property
    def counts(self) -> bool:
        """Whether it counts in the worst case: an attack on the full defense."""
        return self.attack is not None and self.target.source.target is full_defense


Plan = list[tuple[Value, list[Task]]]


def measurement_plan(config: SweepConfig, callbacks: Sequence[RobustEval], run: Run) -> Plan:
    """Return the tasks of each value."""
    over = str(config.over)
    attacks = [attack for callback in callbacks for attack in callback.attacks.values()]
    if not attacks:
        raise ValueError(
            "no attacks to sweep: add --trainer.callbacks+=callbacks/adaptive_pgd.yaml"
        )
    wanted = over if over in ("steps", "neighbours") else "threat"
    if not any(hasattr(part, wanted) for attack in attacks for part in walk(attack)):
        raise ValueError(f"no attack has {wanted} to sweep over: add callbacks/arc.yaml")
    settings, plan = run.settings(), []
    # Every defense and attack is built before the first is measured: a misfit shows at once.
    for value in config.points:
        targets = [Target(over, value.number, callback) for callback in callbacks]
        tasks = [task for target in targets for task in _tasks(target, run, settings)]
        plan.append((value, tasks))
    first = plan[0][1]
    names = [*dict.fromkeys(task.name for task in first)]
    names += [WORST] * (sum(task.counts for task in first) > 1)
    if config.best and config.best not in names:
        raise ValueError(f"choose --best from {', '.join(names)}, got {config.best!r}")
    return plan


def _tasks(target: Target, run: Run, settings: dict[str, Any]) -> Iterator[Task]:
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
        # The key is without the value swept: tasks that it does not change are measured once.
        place = {"variable": target.over, "value": target.value, "stage": "test"}
        details = place | specs | shared | {"versions": settings["versions"]}
        yield Task(name, attack, target, details, cache_key(name=name, **specs, **depends))


@dataclass(frozen=True)
class Point:
    """A result and its per-image scores."""

    result: Result
    scores: Scores

    @property
    def place(self) -> tuple[str, str, str]:
        """Variable, value, and key of all that the result depends on."""
        details = self.result.details
        return details["variable"], repr(float(details["value"])), str(details["reuse"]["key"])


class ResultCache:
    """Recorded results by all that they depend on, so that none is measured twice."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.files = ScoreFiles(folder, SCORES)
        self.points: dict[str, Point] = {}
        self.places: set[tuple[str, str, str]] = set()
        for fields in read_json_lines(self.path):
            try:
                if (scores := self.files.read(fields)) is not None:
                    point = Point(Result.from_record(fields), scores)
                    self.places.add(point.place)
                    self.points.setdefault(point.place[-1], point)
            except (ValueError, KeyError, TypeError, AttributeError):  # a record of another kind
                continue

    def add(self, points: Sequence[Point], write: bool) -> None:
        """Keep results; one of the processes writes each that the file lacks for its value."""
        unique = {point.place: point for point in points}
        new = [point for place, point in unique.items() if place not in self.places]
        if write and new:
            for point in new:
                if point.place[-1] not in self.points:
                    self.files.write(point.place[-1], point.scores)
            append_records(self.path, (point.result.record() for point in new))
        self.places |= unique.keys()
        for point in new:
            self.points.setdefault(point.place[-1], point)


@dataclass(frozen=True)
class Sweep:
    """Measures the results that the cache lacks, beside callbacks that do not report."""

    config: SweepConfig
    run: Run
    others: Sequence[Callback]
    cache: ResultCache
    failures: dict[Value, Exception] = field(default_factory=dict)

    def measure(self, plan: Plan) -> dict[Value, Row]:
        """Return each value's results by name, and print each value's accuracies."""
        table: dict[Value, Row] = {}
        writes = self.run.trainer.is_global_zero
        for number, (value, tasks) in enumerate(plan, start=1):
            began = time.perf_counter()
            place = f"[{number}/{len(plan)}] {self.config.over} {value.label}"
            try:
                new = self._measured(tasks)
            except Exception as error:  # any one: the other values are measured
                self.failures[value] = error
                # Other processes would wait for this one, and all values have one cause.
                if self.run.trainer.world_size > 1 or len(self.failures) == len(plan):
                    raise next(iter(self.failures.values())) from None
                print(f"{place}: failed, {_reason(error)}")
                continue
            points = [self._point(task, new) for task in tasks]
            self.cache.add(points, writes)
            worst = self._worst_point(tasks)
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
            source = target.source
            measurements[target] = Measurement(attacks, target, source.settings, source.inputs)
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
        # The scores may come from another value, which changes nothing for this attack: the
        # details are this task's own, but for what only the measurement knows.
        own = {name: source.result.details[name] for name in MEASURED}
        details = task.details | own | {"reuse": self.cache.files.reference(task.key)}
        scores = source.scores[1]
        draws = scores if own["private_draws"] > 1 else None
        result = measured(task.name, scores.mean(1), source.result.seconds, details, draws)
        return Point(result, source.scores)

    def _worst_point(self, tasks: Sequence[Task]) -> list[Point]:
        """Return the result under the strongest of several attacks on the full defense, if any."""
        counted = [task for task in tasks if task.counts]
        if len(counted) < 2:
            return []
        clean = [task for task in tasks if task.attack is None]  # counts too, as in `RobustEval`
        over = [self.cache.points[task.key] for task in (*clean, *counted)]
        tables = [(index, scores[:, None]) for index, scores in (point.scores for point in over)]
        random = any(point.result.details["random"] for point in over)
        found = worst_case(tables, random, self.run.defense.transductive)
        key = cache_key(name=WORST, over=[task.key for task in counted])
        last = over[-1].result.details
        details = {k: v for k, v in counted[0].details.items() if k not in ("attack", "threat")}
        details |= {name: last[name] for name in MEASURED}
        details |= {"over": [task.name for task in counted]}
        details |= {"reuse": self.cache.files.reference(key)}
        worst = found.row(details, (index for index, _ in tables), last["private_draws"])
        return [Point(worst, (found.index, found.scores))]
