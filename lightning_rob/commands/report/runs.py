"""Runs and their records, read without trusting their content."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.commands.report.blocks import WHOLE, Interval
from lightning_rob.commands.specs import Spec, class_name, is_spec

SCHEMA = 1  # the version of the records that a report reads
MONITOR, AUDIT = "monitor.jsonl", "audit.json"
Fields = dict[str, Any]
Key = tuple[str, str]  # attack and target


def is_interval(value: Any) -> bool:
    """Return whether a value is a list of two finite numbers."""
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_matrix(value: Any) -> bool:
    """Return whether a value is a list of equally long rows of numbers."""
    is_table = isinstance(value, list) and all(isinstance(row, list) for row in value)
    if not (is_table and value and value[0] and len(set(map(len, value))) == 1):
        return False
    return all(isinstance(x, int | float) for row in value for x in row)


def _is_finding(value: Any) -> bool:
    names = ("name", "severity", "text", "advice")
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


VALID: dict[str, Callable[[Any], bool]] = {  # the values that a report reads
    **dict.fromkeys(("name", "stage", "target", "checkpoint"), _is(str)),
    **dict.fromkeys(("epoch", "step", "position", "n"), _is(int)),
    **dict.fromkeys(("attack", "threat"), is_spec),
    **dict.fromkeys(("alarm", "intervals"), _is(list)),
    **dict.fromkeys(("versions", "change"), _is(dict)),
    "power": lambda value: isinstance(value, dict) and isinstance(value.get("text"), str),
    "accuracy": _is(type(None), int, float),
    "findings": lambda value: isinstance(value, list) and all(map(_is_finding, value)),
    "seconds": _is_number,
    "interval": is_interval,
    "matrix": _is_matrix,
    "over": lambda value: isinstance(value, list) and all(map(_is(str), value)),
}


def readable(fields: Fields) -> Fields:
    """Return a record without the fields that hold another kind of value than they should."""
    return {key: value for key, value in fields.items() if key not in VALID or VALID[key](value)}


def records_in(path: Path) -> Iterator[Fields]:
    """Yield the records of a file; half-written and foreign lines are passed over."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and fields.get("schema") == SCHEMA:
            yield readable(fields)


@dataclass(frozen=True)
class AttackResult:
    """Accuracy under one attack in one evaluation; `docs/evaluation.md` explains the fields."""

    name: str  # of the attack, or "clean" or "worst"
    stage: str  # "test" or "val"
    accuracy: float  # NaN where no image was attacked
    epoch: int = 0
    target: str = WHOLE
    interval: Interval = None
    n: int = 0
    seconds: float = 0.0
    attack: Spec = field(default_factory=dict)
    threat: Spec = field(default_factory=dict)
    over: Sequence[str] = ()
    seed: int | None = None
    repeats: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    plug_in: str = ""
    findings: Sequence[Mapping[str, str]] = ()
    power: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """The attack and its target, which make a line of a figure."""
        return self.name, self.target

    @property
    def is_attack(self) -> bool:
        """Whether this is a single attack, neither "clean" nor "worst"."""
        return self.name not in ("clean", "worst")


def attack_result(record: Fields) -> AttackResult | None:
    """Return an accuracy record as a result; None for any other record."""
    if not {"name", "stage", "accuracy"} <= record.keys():
        return None
    if record["accuracy"] is None:  # JSON has no NaN
        record = record | {"accuracy": math.nan, "interval": None}
    names = [of.name for of in dataclass_fields(AttackResult) if of.name in record]
    return AttackResult(**{name: record[name] for name in names})


def by_line(evaluations: Iterable[Mapping[Key, AttackResult]]) -> dict[Key, list[AttackResult]]:
    """Return the results of each attack and target, in the order of the evaluations."""
    lines: dict[Key, list[AttackResult]] = {}
    for results in evaluations:
        for key, result in results.items():
            lines.setdefault(key, []).append(result)
    return lines


class Evaluations:
    """Results by stage and epoch; if an epoch was evaluated twice, the last results count."""

    def __init__(self, results: Iterable[AttackResult]) -> None:
        self.by_stage: dict[str, dict[int, dict[Key, AttackResult]]] = {}
        for result in results:
            epochs = self.by_stage.setdefault(result.stage, {})
            # A resumed run goes back in time: what it measured beyond that epoch is dropped.
            for later in [epoch for epoch in epochs if epoch > result.epoch]:
                del epochs[later]
            epochs.setdefault(result.epoch, {})[result.key] = result

    def last(self) -> list[AttackResult]:
        """Return the last test, else the last validation, else any other evaluation."""
        for stage in ("test", "val", *self.by_stage):
            if epochs := self.by_stage.get(stage):
                return list(epochs[max(epochs)].values())
        return []

    def series(self, stage: str = "val") -> dict[Key, list[AttackResult]]:
        """Return the results of each attack by epoch."""
        return by_line(results for _, results in sorted(self.by_stage.get(stage, {}).items()))


@dataclass(frozen=True)
class Run:
    """A folder with records."""

    folder: Path
    label: str  # that no other run on the page has
    evaluations: Evaluations  # of `RobustEval`
    matrices: list[Fields]  # of `TransferMatrixEval`, the last of each stage and attack
    votes: list[Fields]  # of `VotingRuleEval`, the last of each stage, attack, ensemble and rule
    sweep: list[Fields]
    monitor: list[Fields]
    audit: Fields  # of `RobustAudit`; empty where there is none
    others: dict[str, Fields]  # last record of a gallery by the name of its file
    recipe: str  # text of config.yaml, and its content
    config: Fields
    pictures: list[Path]

    @property
    def data(self) -> str:
        """The class of the data, such as "MNIST"."""
        return class_name(setting(self.config, "data", "class_path"))

    @property
    def title(self) -> str:
        """Method and data, such as "BAT on MNIST"; the label where there is no recipe."""
        method = class_name(setting(self.config, "model", "class_path"))
        return " on ".join(filter(None, (method, self.data))) or self.label


def setting(config: Any, *path: str) -> Any:
    """Return a value deep in a configuration, None where the path ends early."""
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return the runs in these folders and below them, each once, in natural order."""

    def natural(path: Path) -> list[tuple[int, str]]:  # version_10 after version_9
        return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", str(path))]

    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no folder {path}")
        if not path.is_dir():
            raise ValueError(f"{path} is a file; give the folder of a run, such as {path.parent}")
        files = [*path.rglob("*.jsonl"), *path.rglob(AUDIT)]
        for folder in sorted({file.parent for file in files}, key=natural):
            folders.setdefault(folder.resolve(), folder)
    runs = []
    for run in map(read_run, folders.values()):
        tables = run.matrices or run.votes or run.sweep or run.monitor or run.audit
        if run.evaluations.by_stage or tables or (run.others and run.pictures):
            runs.append(run)
    if not runs:
        searched = ", ".join(map(str, paths))
        raise ValueError(
            f"no records in {searched}: RobustEval writes robust.jsonl to the folder of a run"
        )
    # The label is as little of the path as distinguishes the run.
    parents = [run.folder.resolve().parent for run in runs]
    top = Path(os.path.commonpath(parents)) if len(runs) > 1 else parents[0].parent
    labels = [run.folder.resolve().relative_to(top).as_posix() for run in runs]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def read_run(folder: Path) -> Run:
    """Read all records of a folder; the field `kind` names their type, not the file."""
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != MONITOR]
    found: list[tuple[str, Fields]] = []
    for path in files:
        records = list(records_in(path))
        tests = [fields.get("session") for fields in records if fields.get("stage") == "test"]
        # The weights of earlier processes may have been others: their tests do not count.
        found += [
            (path.stem, fields)
            for fields in records
            if fields.get("stage") != "test" or fields.get("session") == tests[-1]
        ]
    kinds: dict[Any, list[Fields]] = {}
    for _, fields in found:
        if "variable" not in fields:
            kinds.setdefault(fields.get("kind"), []).append(fields)
    matrices = [fields for fields in kinds.get("transfer_matrix", ()) if "matrix" in fields]
    recipe = folder / "config.yaml"
    text = recipe.read_text(errors="replace") if recipe.is_file() else ""
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        config = {}
    return Run(
        folder=folder,
        label=folder.name,
        evaluations=Evaluations(filter(None, map(attack_result, kinds.get("accuracy", ())))),
        matrices=_last(matrices, "name"),
        votes=_last(kinds.get("voting_rule", ()), "name", "ensemble", "rule"),
        sweep=[fields for _, fields in found if "variable" in fields],
        monitor=list(records_in(folder / MONITOR)),
        audit=_audit(folder / AUDIT),
        others={stem: fields for stem, fields in found if fields.get("kind") == "gallery"},
        recipe=text,
        config=config if isinstance(config, dict) else {},
        pictures=sorted(filter(Path.is_file, folder.glob("*.png"))),
    )


def _audit(path: Path) -> Fields:
    try:
        # A pipe of this name would never end.
        found = json.loads(path.read_text(errors="replace")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    is_audit = isinstance(found, dict) and found.get("schema") == SCHEMA
    if is_audit and found.get("kind") == "audit" and isinstance(found.get("findings"), list):
        return {**found, "attacks": list(map(readable, found.get("attacks", [])))}
    return {}


def _last(records: Iterable[Fields], *names: str) -> list[Fields]:
    """Return the last record for each value of these fields, from the test if there was one."""
    last = {tuple(str(fields.get(key)) for key in ("stage", *names)): fields for fields in records}
    return [f for f in last.values() if f.get("stage") == "test"] or list(last.values())
