"""Runs and their records, read without trusting their content."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml

from lightning_rob.commands.report.formatting import WHOLE
from lightning_rob.commands.specs import Spec, class_name, is_spec

SCHEMA = 1  # the version of the records that a report reads
MONITOR, AUDIT = "monitor.jsonl", "audit.json"
Fields = dict[str, Any]
Key = tuple[str, str]  # attack and target
T = TypeVar("T", list[Any], dict[Any, Any])


@dataclass(frozen=True)
class AttackResult:
    """Accuracy under one attack in one evaluation; `docs/evaluation.md` explains the fields.

    Args:
        name: of the attack, or "clean" or "worst".
        stage: "test" or "val".
        epoch: counted from 0.
        target: the attacked part of the defense.
        accuracy: in [0, 1]; NaN where no image was attacked.
        interval: of 95 %; None where it is not known.
        n: number of images.
        seconds: spent attacking.
        attack: with its arguments; empty for "clean" and "worst".
        threat: of the attack.
        over: for "worst", the attacks of which it is the strongest.
        seed: of the evaluation's noise.
        repeats: evaluations with fresh noise.
        versions: of the packages.
    """

    name: str
    stage: str
    epoch: int
    target: str
    accuracy: float
    interval: tuple[float, float] | None
    n: int
    seconds: float
    attack: Spec
    threat: Spec
    over: tuple[str, ...]
    seed: str
    repeats: str
    versions: tuple[str, ...]

    @property
    def key(self) -> Key:
        """The attack and its target, which make a line of a figure."""
        return self.name, self.target

    @property
    def is_attack(self) -> bool:
        """Whether it is of one attack, not of clean images or of the strongest of several."""
        return self.name not in ("clean", "worst")


def records_in(path: Path) -> Iterator[Fields]:
    """Yield the records of a file; half-written and foreign lines are passed over."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and fields.get("schema") == SCHEMA:
            yield fields


def attack_result(fields: Fields) -> AttackResult | None:
    """Return an accuracy record as a result; None for any other record."""
    name, stage, accuracy = (fields.get(key) for key in ("name", "stage", "accuracy"))
    measured = _is_number(accuracy)  # JSON has no NaN: it is null
    known = measured or ("accuracy" in fields and accuracy is None)
    if not (isinstance(name, str) and isinstance(stage, str) and known):
        return None
    return AttackResult(
        name=name,
        stage=stage,
        epoch=int(_number(fields, "epoch")),
        target=_text(fields, "target") or WHOLE,
        accuracy=math.nan if accuracy is None else float(accuracy),
        interval=read_interval(fields.get("interval")) if measured else None,
        n=int(_number(fields, "n")),
        seconds=_number(fields, "seconds"),
        attack=_spec(fields, "attack"),
        threat=_spec(fields, "threat"),
        over=tuple(map(str, typed(fields, "over", list))),
        seed=_text(fields, "seed"),
        repeats=_text(fields, "repeats"),
        versions=tuple(f"{k} {v}" for k, v in typed(fields, "versions", dict).items()),
    )


def typed(fields: Fields, key: str, kind: type[T]) -> T:
    """Return a field, an empty one where it is of another kind."""
    value = fields.get(key)
    return value if isinstance(value, kind) else kind()


def read_interval(value: Any) -> tuple[float, float] | None:
    """Return two finite numbers, or None."""
    if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        low, high = map(float, value)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    return None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(fields: Fields, key: str) -> float:
    value = fields.get(key)
    return float(value) if _is_number(value) and math.isfinite(value) else 0.0


def _text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return "" if value is None else str(value)


def _spec(fields: Fields, key: str) -> Spec:
    value: Any = fields.get(key)
    return value if is_spec(value) else {}


def by_line(evaluations: Iterable[Mapping[Key, AttackResult]]) -> dict[Key, list[AttackResult]]:
    """Return the results of each attack and target, in the order of the evaluations."""
    lines: dict[Key, list[AttackResult]] = {}
    for results in evaluations:
        for key, result in results.items():
            lines.setdefault(key, []).append(result)
    return lines


class Evaluations:
    """Results by stage and epoch; of an epoch evaluated twice the last results count.

    A resumed run goes back in time: its earlier results beyond that epoch are dropped.
    """

    def __init__(self, results: Iterable[AttackResult]) -> None:
        self.by_stage: dict[str, dict[int, dict[Key, AttackResult]]] = {}
        for result in results:
            epochs = self.by_stage.setdefault(result.stage, {})
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
    """A folder with records.

    Args:
        folder: its path.
        label: distinguishes it from the other runs on the page.
        evaluations: of `RobustEval`.
        matrices: of `TransferMatrixEval`, the last of each stage and attack.
        votes: of `VotingRuleEval`, the last of each stage, attack, ensemble and rule.
        sweep: of `lightning-rob sweep`.
        monitor: of `lightning-rob monitor`.
        audit: of `RobustAudit`; empty where there is none.
        others: by file, the last record of another kind.
        recipe: the text of its config.yaml; empty where there is none.
        config: the same, parsed.
        pictures: its PNG files.
    """

    folder: Path
    label: str
    evaluations: Evaluations
    matrices: list[Fields]
    votes: list[Fields]
    sweep: list[Fields]
    monitor: list[Fields]
    audit: Fields
    others: dict[str, Fields]
    recipe: str
    config: Fields
    pictures: list[Path]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report."""
        tables = self.matrices or self.votes or self.sweep or self.monitor or self.audit
        return not (self.evaluations.by_stage or tables or (self.others and self.pictures))

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
    """Return the runs in these folders and below them, each once, in natural order.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: not a folder, or nothing is recorded in any of them.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no folder {path}")
        if not path.is_dir():
            raise ValueError(f"{path} is a file; give the folder of a run, such as {path.parent}")
        files = [*path.rglob("*.jsonl"), *path.rglob(AUDIT)]
        for folder in sorted({file.parent for file in files}, key=_natural):
            folders.setdefault(folder.resolve(), folder)
    runs = [run for folder in folders.values() if not (run := read_run(folder)).empty]
    if not runs:
        searched = ", ".join(map(str, paths))
        raise ValueError(
            f"no records in {searched}: RobustEval writes robust.jsonl to the folder of a run"
        )
    return _labelled(runs)


def read_run(folder: Path) -> Run:
    """Read all records of a folder; their `kind` says what they are, not the file's name."""
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != MONITOR]
    found = [(path.stem, fields) for path in files for fields in _of_last_test(records_in(path))]
    records = [fields for _, fields in found if "variable" not in fields]
    matrices = [f for f in _of_kind(records, "transfer_matrix") if is_matrix(f.get("matrix"))]
    recipe, monitor = folder / "config.yaml", folder / MONITOR
    text = recipe.read_text(errors="replace") if recipe.is_file() else ""
    return Run(
        folder=folder,
        label=folder.name,
        evaluations=Evaluations(filter(None, map(attack_result, _of_kind(records, "accuracy")))),
        matrices=_last(matrices, "name"),
        votes=_last(_of_kind(records, "voting_rule"), "name", "ensemble", "rule"),
        sweep=[fields for _, fields in found if "variable" in fields],
        monitor=list(records_in(monitor)) if monitor.is_file() else [],
        audit=_audit(folder / AUDIT),
        others={stem: fields for stem, fields in found if fields.get("kind") == "gallery"},
        recipe=text,
        config=_parsed(text),
        pictures=sorted(folder.glob("*.png")),
    )


def _of_kind(records: Iterable[Fields], kind: str) -> list[Fields]:
    return [fields for fields in records if fields.get("kind") == kind]


def _audit(path: Path) -> Fields:
    """Return the audit's record; empty where there is none."""
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    is_audit = isinstance(found, dict) and found.get("schema") == SCHEMA
    is_audit = is_audit and found.get("kind") == "audit" and isinstance(found.get("findings"), list)
    return found if is_audit else {}


def _of_last_test(records: Iterable[Fields]) -> list[Fields]:
    """Drop the tests of earlier processes: their weights may have been others."""
    kept = list(records)
    tests = [fields.get("session") for fields in kept if fields.get("stage") == "test"]
    return [f for f in kept if f.get("stage") != "test" or f.get("session") == tests[-1]]


def _last(records: Iterable[Fields], *names: str) -> list[Fields]:
    """Return the last record by stage and these fields; those of the test if there was one."""
    last = {tuple(str(fields.get(key)) for key in ("stage", *names)): fields for fields in records}
    return [f for f in last.values() if f.get("stage") == "test"] or list(last.values())


def is_matrix(value: Any) -> bool:
    """Whether it is a list of rows of numbers, all of one length."""
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        return False
    numbers = all(isinstance(x, int | float) for row in value for x in row)
    return numbers and len({len(row) for row in value}) == 1 and bool(value[0])


def _parsed(text: str) -> Fields:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts version_10 after version_9."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", str(path))]


def _labelled(runs: list[Run]) -> list[Run]:
    """Label each run with as little of its path as distinguishes it."""
    folders = [run.folder.resolve() for run in runs]
    top = Path(os.path.commonpath([folder.parent for folder in folders]))
    if len(runs) == 1:
        top = top.parent
    labels = [folder.relative_to(top).as_posix() for folder in folders]
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
