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
from lightning_rob.commands.specs import Spec, class_name
from lightning_rob.runtime.files import read_json_lines

SCHEMA = 1  # the version of the records that a report reads
MONITOR, AUDIT = "monitor.jsonl", "audit.json"
Fields = dict[str, Any]
Key = tuple[str, str]  # attack and target
SORTED_BY = {"name": str, "stage": str, "target": str, "epoch": int}  # fields, and their types


def records_in(path: Path) -> Iterator[Fields]:
    """Yield the records of a file; half-written and foreign lines are passed over."""
    for fields in read_json_lines(path):
        sorts = (isinstance(fields.get(name, kind()), kind) for name, kind in SORTED_BY.items())
        if fields.get("schema") == SCHEMA and all(sorts):
            yield fields


@dataclass(frozen=True)
class AttackResult:
    """Accuracy under one attack in one evaluation; `docs/records.md` explains the fields."""

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
    known_noise: Mapping[str, Any] = field(default_factory=dict)  # accuracy, interval, n, ball

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

    def series(self) -> dict[Key, list[AttackResult]]:
        return by_line(results for _, results in sorted(self.by_stage.get("val", {}).items()))


@dataclass(frozen=True)
class Run:
    """A folder with records."""

    folder: Path
    label: str  # that no other run on the page has
    evaluations: Evaluations  # of `RobustEval`
    votes: list[Fields]  # of `VotingRuleEval`, the last of each stage, attack, ensemble and rule
    overfitting: list[Fields]  # verdicts of `RobustCheckpoint`
    certified: list[Fields]  # of `certify`, by radius
    monitor: list[Fields]
    audit: Fields  # of `RobustAudit`; empty where there is none
    recipe: str  # text of config.yaml, and its content
    config: Fields
    pictures: list[Path]

    @property
    def data(self) -> str:
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
        records = run.evaluations.by_stage or run.votes or run.certified or run.overfitting
        if records or run.monitor or run.audit or run.pictures:
            runs.append(run)
    if not runs:
        searched = ", ".join(map(str, paths))
        files = [file for folder in folders.values() for file in folder.glob("*.jsonl")]
        schemas = {str(fields.get("schema")) for file in files for fields in read_json_lines(file)}
        if others := sorted(schemas - {str(SCHEMA), "None"}):
            raise ValueError(
                f"the records in {searched} have schema {', '.join(others)}, "
                f"this version reads {SCHEMA}"
            )
        raise FileNotFoundError(
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
    found: list[Fields] = []
    for path in files:
        records = list(records_in(path))
        tests = [fields.get("session") for fields in records if fields.get("stage") == "test"]
        # The weights of earlier processes may have been others: their tests do not count.
        found += [
            fields
            for fields in records
            if fields.get("stage") != "test" or fields.get("session") == tests[-1]
        ]
    kinds: dict[Any, list[Fields]] = {}
    for fields in found:
        if "variable" not in fields:  # those are of a sweep
            kinds.setdefault(fields.get("kind"), []).append(fields)
    audit = mapping_in(text_of(folder / AUDIT), json.loads)
    is_audit = (audit.get("schema"), audit.get("kind")) == (SCHEMA, "audit")
    recipe = text_of(folder / "config.yaml")
    return Run(
        folder=folder,
        label=folder.name,
        evaluations=Evaluations(filter(None, map(attack_result, kinds.get("accuracy", ())))),
        votes=_last(kinds.get("voting_rule", ()), "name", "ensemble", "rule"),
        overfitting=_last(kinds.get("overfitting", ()), "name"),
        certified=kinds.get("certified", [])[-1:],
        monitor=list(records_in(folder / MONITOR)),
        audit=audit if is_audit else {},
        recipe=recipe,
        config=mapping_in(recipe, yaml.safe_load),
        pictures=sorted(filter(Path.is_file, folder.glob("*.png"))),
    )


def _last(records: Iterable[Fields], *names: str) -> list[Fields]:
    """Return the last record for each value of these fields, from the test if there was one."""
    last = {tuple(str(fields.get(key)) for key in ("stage", *names)): fields for fields in records}
    return [f for f in last.values() if f.get("stage") == "test"] or list(last.values())


def text_of(path: Path) -> str:
    """Return the text of a file, empty without one."""
    # A pipe of this name would never end.
    return path.read_text("utf-8", "replace") if path.is_file() else ""


def mapping_in(text: str, load: Callable[[str], Any]) -> Fields:
    """Return the mapping that a text holds, empty if it holds anything else."""
    try:
        content = load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
