"""The folders that hold records, and what is in them."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.report.records import Evaluations, Fields, Record, lines, record

SWEEP, MONITOR, AUDIT = "sweep", "monitor.jsonl", "audit.json"
VOTE = ("name", "ensemble", "rule")


@dataclass(frozen=True)
class Run:
    """One folder with records.

    Args:
        folder: where it is.
        label: what tells it from the other runs on the page.
        evaluations: of `RobustEval`.
        matrices: lines of `TransferMatrixEval`, the last of each stage and attack.
        votes: lines of `VotingRuleEval`, the last of each stage, attack, ensemble and rule.
        sweep: lines of a sweep.
        monitor: lines of `lightning-rob monitor`.
        audit: of `RobustAudit`; empty where there is none.
        others: by file, the last line of another kind.
        recipe: the text of its config.yaml; empty where there is none.
        config: the same, parsed.
        pictures: its PNG files.
    """

    folder: Path
    label: str
    evaluations: Evaluations
    matrices: list[Fields] = field(default_factory=list)
    votes: list[Fields] = field(default_factory=list)
    sweep: list[Fields] = field(default_factory=list)
    monitor: list[Fields] = field(default_factory=list)
    audit: Fields = field(default_factory=dict)
    others: dict[str, Fields] = field(default_factory=dict)
    recipe: str = ""
    config: Fields = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        drawn = self.pictures if self.others else []
        tables = self.matrices or self.votes or self.sweep or self.monitor or self.audit
        return not (self.evaluations.by_stage or tables or drawn)

    @property
    def method(self) -> str:
        """The class that trains, such as "BAT"."""
        return class_name(setting(self.config, "model", "class_path"))

    @property
    def data(self) -> str:
        """The class of the data, such as "MNIST"."""
        return class_name(setting(self.config, "data", "class_path"))

    @property
    def title(self) -> str:
        """What was trained on what; the folder where no recipe tells."""
        known = [part for part in (self.method, self.data) if part]
        return " on ".join(known) or self.label


def setting(config: Any, *path: str) -> Any:
    """A value deep in a configuration, None where the path ends early."""
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def class_name(path: Any) -> str:
    """The last part of a class path."""
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def find(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders and below them, each once, in natural order.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: not a folder, or nothing is recorded in any of them.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no folder {path}")
        if not path.is_dir():
            raise ValueError(f"{path} is a file; give the folder of a run, such as {path.parent}")
        files = [*path.rglob("*.jsonl"), *path.rglob(AUDIT)]
        folders |= dict.fromkeys(sorted({f.parent for f in files}, key=_natural))
    unique = {folder.resolve(): folder for folder in reversed(folders)}
    found = [read(folder) for folder in reversed(unique.values())]
    runs = [run for run in found if not run.empty]
    if not runs:
        where = ", ".join(map(str, paths))
        raise ValueError(
            f"no records in {where}: RobustEval writes robust.jsonl to the folder of a run"
        )
    return _labelled(runs)


def read(folder: Path) -> Run:
    """Everything in one folder; files are told apart by what is in them."""
    records: list[Record] = []
    matrices: dict[tuple[Any, ...], Fields] = {}
    votes: dict[tuple[Any, ...], Fields] = {}
    sweep: list[Fields] = []
    others: dict[str, Fields] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.name == MONITOR:
            continue
        for fields in current(lines(path)):
            if path.stem.startswith(SWEEP):
                sweep.append(fields)
            elif is_matrix(fields.get("matrix")):
                matrices[str(fields.get("stage")), str(fields.get("name"))] = fields
            elif "rule" in fields:
                votes[tuple(fields.get(key) for key in ("stage", *VOTE))] = fields
            elif found := record(fields):
                records.append(found)
            elif "name" in fields and "stage" in fields:
                others[path.stem] = fields
    recipe = folder / "config.yaml"
    text = recipe.read_text(errors="replace") if recipe.is_file() else ""
    return Run(
        folder=folder,
        label=folder.name,
        evaluations=Evaluations(records),
        matrices=_of_one_stage(matrices.values()),
        votes=_of_one_stage(votes.values()),
        sweep=sweep,
        monitor=list(lines(watched)) if (watched := folder / MONITOR).is_file() else [],
        audit=_audit(folder / AUDIT),
        others=others,
        recipe=text,
        config=_parsed(text),
        pictures=sorted(folder.glob("*.png")),
    )


def _audit(path: Path) -> Fields:
    """What the audit found; nothing where there was none, or the file is of another kind."""
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("findings"), list) else {}


def current(found: Iterable[Fields]) -> list[Fields]:
    """The lines without earlier tests: what was tested then may have had other weights."""
    kept = list(found)
    tests = [fields.get("session") for fields in kept if fields.get("stage") == "test"]
    return [f for f in kept if f.get("stage") != "test" or f.get("session") == tests[-1]]


def is_matrix(value: Any) -> bool:
    """Whether it is rows of as many numbers each."""
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        return False
    numbers = all(isinstance(x, int | float) for row in value for x in row)
    return numbers and len({len(row) for row in value}) == 1 and bool(value[0])


def _of_one_stage(matrices: Iterable[Fields]) -> list[Fields]:
    """Those of the test where there was one."""
    found = list(matrices)
    return [m for m in found if m.get("stage") == "test"] or found


def _parsed(text: str) -> Fields:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts version_10 after version_9."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", str(path))]


def _labelled(runs: list[Run]) -> list[Run]:
    """Folders told from one another by as little of their path as that takes."""
    whole = [run.folder.resolve() for run in runs]
    top = Path(os.path.commonpath([folder.parent for folder in whole]))
    if len(runs) == 1:
        top = top.parent
    labels = [folder.relative_to(top).as_posix() for folder in whole]
    return [Run(**(vars(run) | {"label": label})) for run, label in zip(runs, labels, strict=True)]
