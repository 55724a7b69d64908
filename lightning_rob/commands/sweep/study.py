"""`lightning-rob sweep`: attack a checkpoint once for each value of a variable."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
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
from lightning_rob.commands.sweep import OF_DEFENSE, SweepConfig, Value
from lightning_rob.commands.sweep.table import Row, SweepTable
from lightning_rob.defenses import Defense, Ensemble
from lightning_rob.evaluation.records import Result, append_records
from lightning_rob.evaluation.results import WORST, worst_measurement
from lightning_rob.plots import save
from lightning_rob.runtime.errors import Fault, reason_of
from lightning_rob.runtime.files import read_json_lines
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import CLEAN

RECORD, SCORES = "sweep.jsonl", "sweep_scores"


def run(config: SweepConfig, built: Run) -> None:
    """Sweep, print the table, and write records and figure."""
    weights = fingerprint(built.defense)
    name = Path(built.checkpoint).stem if built.checkpoint else type(built.model).__name__
    folder = config.out or Path("sweeps") / f"{name}_{weights[:8]}_{config.over}"
    folder.mkdir(parents=True, exist_ok=True)  # before the work
    with without_reporting(built.trainer) as (callbacks, others):
        for callback in callbacks:
            callback.setup(built.trainer, built.model, "test")  # renames clashing attacks
        points = planned(config, [one for one in callbacks if one.attacks], built)
        table, failures = swept(config.own(points), config, built, others, folder)
    if built.trainer.is_global_zero and config.part is None:
        outcome = SweepTable(config, table)
        outcome.show(folder / "sweep.md")
        # `sweep.jsonl` may hold other sweeps, so a record of its own says what this table has.
        keys = [[point.value.number, point.key] for point in points if point.value in table]
        study = {"kind": "sweep_study", "variable": config.over, "points": keys}
        append_records(folder / "sweep_studies.jsonl", [study | {"command": built.command}])
        save(outcome.figure(), folder / "sweep.png")
        if config.best:
            print(outcome.best())
        print(f"Wrote {folder}/sweep.jsonl, sweep.md and sweep.png")
    if failures:
        raise Fault(f"{len(failures)} of {len(points)} values failed, {'; '.join(failures)}")


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
class Point:
    """The evaluations at one value: one for each target of the attacks and its settings."""

    value: Value
    evaluations: list[tuple[Callable[[Defense], Defense], Measurement]]
    key: str  # of all that the results depend on


def planned(config: SweepConfig, callbacks: Sequence[RobustEval], run: Run) -> list[Point]:
    """Build every defense and attack before the first is measured: a misfit shows at once."""
    over = str(config.over)
    attacks = {name: attack for one in callbacks for name, attack in one.attacks.items()}
    if not attacks:
        raise ValueError(
            "no attacks to sweep: add --trainer.callbacks+=callbacks/adaptive_pgd.yaml"
        )
    wanted = over if over in ("steps", "neighbours") else "threat"
    if not any(hasattr(part, wanted) for attack in attacks.values() for part in walk(attack)):
        raise ValueError(f"no attack has {wanted} to sweep over: add callbacks/arc.yaml")
    whole = [name for one in callbacks if one.target is full_defense for name in one.attacks]
    names = [*[CLEAN] * bool(whole), *attacks, *[WORST] * (len(whole) > 1)]
    if config.best and config.best not in names:
        raise ValueError(f"choose --best from {', '.join(names)}, got {config.best!r}")
    together: dict[Hashable, list[RobustEval]] = {}
    for one in callbacks:
        together.setdefault((one.target, one.settings), []).append(one)
    groups, settings = [*together.values()], run.settings()
    return [_point(over, value, groups, run, settings) for value in config.points]


def _point(
    over: str, value: Value, groups: Sequence[list[RobustEval]], run: Run, settings: dict[str, Any]
) -> Point:
    evaluations, parts = [], []
    for group in groups:
        first = group[0]
        attacks = {name: attack for one in group for name, attack in one.attacks.items()}
        if over not in OF_DEFENSE:
            attacks = {n: with_value(attack, over, value.number) for n, attack in attacks.items()}
        target = partial(_attacked_part, first, over, value.number)
        evaluations.append(
            (first.target, Measurement(attacks, target, first.settings, first.inputs))
        )
        specs = {name: attack_spec(attack) for name, attack in attacks.items()}
        defense = fingerprint(target(first.defense_of(run.model)))
        parts.append([defense, specs, first.settings.asdict(), first.settings.max_images])
    return Point(
        value, evaluations, cache_key(over=over, value=value.number, parts=parts, **settings)
    )


def _attacked_part(source: RobustEval, over: str, value: float, defense: Defense) -> Defense:
    return source.target(changed(defense, over, value))


def recorded(folder: Path) -> dict[str, Row]:
    """Return the recorded results by the key of their point and by name."""
    found: dict[str, Row] = {}
    for fields in read_json_lines(folder / RECORD):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # of another kind
            result = Result.from_record(fields)
            found.setdefault(result.details["reuse"]["key"], {})[result.name] = result
    return found


def swept(
    points: Sequence[Point], config: SweepConfig, run: Run, others: Sequence[Callback], folder: Path
) -> tuple[dict[Value, Row], list[str]]:
    """Return each value's results by name, and why values failed; print each one's accuracies."""
    table, failures, known = dict[Value, Row](), list[str](), recorded(folder)
    for number, point in enumerate(points, start=1):
        began, row = time.perf_counter(), known.get(point.key)
        place = f"[{number}/{len(points)}] {config.over} {point.value.label}"
        took = "recorded"
        if row is None:
            try:
                row = _measured(point, config, run, others, folder)
            except Exception as error:  # any one: the other values are measured
                failures.append(f"{point.value.label}: {reason_of(error)}")
                # Other processes would wait for this one, and all values have one cause.
                if run.trainer.world_size > 1 or len(failures) == len(points):
                    raise
                print(f"{place}: failed, {reason_of(error)}")
                continue
            took = f"{time.perf_counter() - began:.0f} s"
        table[point.value] = row
        if run.trainer.is_global_zero:
            accuracies = ", ".join(f"{r.name} {r.accuracy:.1%}" for r in row.values())
            print(f"{place}: {accuracies} ({took})")
    return table, failures


def _measured(
    point: Point, config: SweepConfig, run: Run, others: Sequence[Callback], folder: Path
) -> Row:
    """Return the results at a value after one test, and record them."""
    targets, measurements = zip(*point.evaluations, strict=True)
    results = measure(run.trainer, run.model, run.data, others, measurements)
    whole = [r for target, r in zip(targets, results, strict=True) if target is full_defense]
    rows: Row = {}
    for number, (target, result) in enumerate(zip(targets, results, strict=True), start=1):
        file = f"{SCORES}/{point.key}_{number}.csv"
        own = {
            "target": getattr(target, "__name__", repr(target)),
            "variable": config.over,
            "value": point.value.number,
            "reuse": {"key": point.key, "scores": file},
        }
        found = result.measurements()
        if whole and result is whole[-1] and sum(len(one.attacks) for one in whole) > 1:
            found.append(worst_measurement(whole))
        for one in found:
            if one.name != CLEAN or target is full_defense:
                rows.setdefault(one.name, replace(one, details=one.details | own))
        if run.trainer.is_global_zero:
            # First: a record names it.
            result.save(folder / file, own | {"weights": fingerprint(run.defense)})
    if run.trainer.is_global_zero:
        append_records(folder / RECORD, [row.record() for row in rows.values()])
    return rows
