"""`lightning-rob sweep`: attack a checkpoint once for each value of a variable."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import chain
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
from lightning_rob.evaluation.records import Result, append_records, versions
from lightning_rob.evaluation.results import WORST
from lightning_rob.runtime.errors import Fault, reason_of
from lightning_rob.runtime.files import read_json_lines
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import CLEAN

RECORD, SCORES = "sweep.jsonl", "sweep_scores"
MEASURED = ("random", "private_draws", "interval_covers")  # details known after the evaluation


def run(config: SweepConfig, built: Run) -> None:
    """Sweep, print the table, and write record, table and figure."""
    weights = fingerprint(built.defense)
    name = Path(built.checkpoint).stem if built.checkpoint else type(built.model).__name__
    folder = config.out or Path("sweeps") / f"{name}_{weights[:8]}_{config.over}"
    with without_reporting(built.trainer) as (callbacks, others):
        for callback in callbacks:
            callback.setup(built.trainer, built.model, "test")  # renames clashing attacks
        plan = measurement_plan(config, callbacks, built)
        sweep = Sweep(config, built, others, ResultCache(folder))
        table = sweep.measure(config.own(plan))
    if built.trainer.is_global_zero and config.part is None:
        facts = {
            "command": built.command,
            "date": datetime.now().astimezone().isoformat(" ", "minutes"),
            "model": f"{type(built.model).__name__}, weights {weights}",
            "checkpoint": built.checkpoint or "none",
            "data": f"test images of {type(built.data).__name__}",
            "versions": ", ".join(f"{package} {v}" for package, v in versions().items()),
        }
        SweepTable(config, table, facts).write(folder)
    if sweep.failures:
        named = "; ".join(f"{v.label}: {reason_of(error)}" for v, error in sweep.failures.items())
        raise Fault(f"{len(sweep.failures)} of {len(plan)} values failed, {named}")


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
class Task:
    """An attack on the defense, or a part of it, at one value: one cell of the table."""

    name: str
    attack: Attack | None  # None for clean images
    source: RobustEval
    target: Callable[[Defense], Defense]  # sets the value and returns what `source` attacks
    details: dict[str, Any]  # fields of the record
    key: str  # of all that the result depends on

    @property
    def counts(self) -> bool:
        """Whether it counts in the worst case: an attack on the full defense."""
        return self.attack is not None and self.source.target is full_defense


Plan = list[tuple[Value, list[Task]]]


def measurement_plan(config: SweepConfig, callbacks: Sequence[RobustEval], run: Run) -> Plan:
    """Return the tasks of each value."""
    over = str(config.over)
    callbacks = [callback for callback in callbacks if callback.attacks]  # others are repetitions
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
        found = (_tasks(source, over, value.number, run, settings) for source in callbacks)
        plan.append((value, [*chain(*found)]))
    first = plan[0][1]
    names = [*dict.fromkeys(task.name for task in first)]
    names += [WORST] * (sum(task.counts for task in first) > 1)
    if config.best and config.best not in names:
        raise ValueError(f"choose --best from {', '.join(names)}, got {config.best!r}")
    return plan


def _attacked_part(source: RobustEval, over: str, value: float, defense: Defense) -> Defense:
    return source.target(changed(defense, over, value))


def _tasks(
    source: RobustEval, over: str, value: float, run: Run, settings: dict[str, Any]
) -> Iterator[Task]:
    """Yield clean images, if the full defense is attacked, and every attack of a callback."""
    target = partial(_attacked_part, source, over, value)
    shared = {
        "target": getattr(source.target, "__name__", repr(source.target)),
        **{name: one for name, one in source.settings.asdict().items() if one is not None},
        "max_images": source.settings.max_images,
    }
    depends = shared | settings | {"defense": fingerprint(target(source.defense_of(run.model)))}
    clean: dict[str, Attack | None] = {CLEAN: None} if source.target is full_defense else {}
    for name, attack in (clean | source.attacks).items():
        specs = {}
        if attack:
            attack = attack if over in OF_DEFENSE else with_value(attack, over, value)
            specs = {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
        # The key leaves out the value swept: tasks that it does not change are measured once.
        place = {"variable": over, "value": value, "stage": "test"}
        details = place | specs | shared | {"versions": settings["versions"]}
        yield Task(name, attack, source, target, details, cache_key(name=name, **specs, **depends))


Scored = tuple[Result, Scores]


class ResultCache:
    """Recorded results by all that they depend on, so that none is measured twice."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD
        self.files = ScoreFiles(folder, SCORES)
        self.found: dict[str, Scored] = {}
        self.places: set[tuple[str, float, str]] = set()  # variable, value and key of each record
        for fields in read_json_lines(self.path):
            try:
                if (scores := self.files.read(fields)) is not None:
                    self.add(Result.from_record(fields), scores, write=False)
            except (ValueError, KeyError, TypeError, AttributeError):  # a record of another kind
                continue

    def add(self, result: Result, scores: Scores, write: bool) -> None:
        """Keep a result; one of the processes writes it if the file lacks it for its value."""
        details = result.details
        key = str(details["reuse"]["key"])
        place = details["variable"], float(details["value"]), key
        if place in self.places:
            return
        if write:
            if key not in self.found:
                self.files.write(key, scores)
            append_records(self.path, [result.record()])
        self.places.add(place)
        self.found.setdefault(key, (result, scores))


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
                print(f"{place}: failed, {reason_of(error)}")
                continue
            row = table.setdefault(value, {})
            for result, scores in self._results(tasks, self.cache.found | new):
                self.cache.add(result, scores, writes)
                row.setdefault(result.name, result)
            if writes:
                took = f"{time.perf_counter() - began:.0f} s" if new else "recorded"
                accuracies = ", ".join(f"{r.name} {r.accuracy:.1%}" for r in row.values())
                print(f"{place}: {accuracies} ({took})")
        return table

    def _measured(self, tasks: Sequence[Task]) -> dict[str, Scored]:
        """Measure the tasks that are not recorded, by key, in one test for all callbacks."""
        missing = [task for task in tasks if task.key not in self.cache.found]
        measurements = {}
        for source, target in dict.fromkeys((task.source, task.target) for task in missing):
            own, lacking = (
                [(task.name, task.attack) for task in some if task.target is target and task.attack]
                for some in (tasks, missing)
            )
            # Also where only clean images are missing an evaluation needs an attack.
            attacks = dict(lacking or own[:1])
            measurements[target] = Measurement(attacks, target, source.settings, source.inputs)
        if not measurements:
            return {}
        run, new = self.run, {}
        found = measure(run.trainer, run.model, run.data, self.others, [*measurements.values()])
        results = dict(zip(measurements, found, strict=True))
        for task in missing:
            result = results[task.target]
            new[task.key] = result.measurement(task.name), scores_by_name(result)[task.name]
        return new

    def _results(self, tasks: Sequence[Task], known: Mapping[str, Scored]) -> Iterator[Scored]:
        """Yield a value's results: of each task, and under the strongest of several attacks."""
        for task in tasks:
            result, scores = known[task.key]
            # The scores may come from another value, which changes nothing for this attack: the
            # details are this task's own, but for what only the measurement knows.
            details = task.details | {name: result.details[name] for name in MEASURED}
            details |= {"reuse": self.cache.files.reference(task.key)}
            yield replace(result, details=details), scores
        counted = [task for task in tasks if task.counts]
        if len(counted) < 2:
            return
        clean = [task for task in tasks if task.attack is None]  # counts too, as in `RobustEval`
        over = [known[task.key] for task in (*clean, *counted)]
        tables = [(index, scores[:, None]) for _, (index, scores) in over]
        random = any(result.details["random"] for result, _ in over)
        found = worst_case(tables, random, self.run.defense.transductive)
        key = cache_key(name=WORST, over=[task.key for task in counted])
        last = over[-1][0].details
        details = {k: v for k, v in counted[0].details.items() if k not in ("attack", "threat")}
        details |= {name: last[name] for name in MEASURED}
        details |= {"over": [task.name for task in counted]}
        details |= {"reuse": self.cache.files.reference(key)}
        yield found.row(details), (found.index, found.scores)
