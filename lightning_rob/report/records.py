"""What evaluations left in a run's folder, read without believing it."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
WHOLE = "full_defense"


@dataclass(frozen=True)
class Record:
    """One attack's figure in one evaluation; `docs/evaluation.md` explains the fields.

    Args:
        name: of the attack, or "clean" or "worst".
        stage: "test" or "val".
        epoch: counted from 0.
        target: what was attacked.
        accuracy: in [0, 1]; NaN where no image was attacked.
        interval: of 95 %; None where it is not known.
        n: images.
        seconds: spent attacking.
        attack: the attack with its arguments.
        threat: what it was allowed to do.
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
    attack: str
    threat: str
    over: tuple[str, ...]
    seed: str
    repeats: str
    versions: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What is one line of a figure: the attack, and what it attacks."""
        return self.name, self.target

    @property
    def an_attack(self) -> bool:
        """Whether it is of one attack, not of clean images or of the strongest of several."""
        return self.name not in ("clean", "worst")


def lines(path: Path) -> Iterator[Fields]:
    """The objects in a file of JSON lines; a half-written or foreign line is passed over."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            yield fields


def record(fields: Fields) -> Record | None:
    """A line as a record; None where it is something else."""
    name, stage, accuracy = (fields.get(key) for key in ("name", "stage", "accuracy"))
    if not isinstance(name, str) or not isinstance(stage, str):
        return None
    if isinstance(accuracy, bool) or not isinstance(accuracy, int | float):
        return None
    over, versions = fields.get("over"), fields.get("versions")
    return Record(
        name=name,
        stage=stage,
        epoch=int(_number(fields, "epoch")),
        target=_text(fields, "target") or WHOLE,
        accuracy=float(accuracy),
        interval=interval(fields.get("interval")),
        n=int(_number(fields, "n")),
        seconds=_number(fields, "seconds"),
        attack=_text(fields, "attack"),
        threat=_text(fields, "threat"),
        over=tuple(map(str, over)) if isinstance(over, list) else (),
        seed=_text(fields, "seed"),
        repeats=_text(fields, "repeats"),
        versions=tuple(f"{k} {v}" for k, v in versions.items())
        if isinstance(versions, dict)
        else (),
    )


def interval(value: Any) -> tuple[float, float] | None:
    """Two finite numbers, or None."""
    if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        low, high = map(float, value)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    return None


class Evaluations:
    """Records by stage and epoch: what was evaluated again counts once, the last time.

    A run that was resumed goes back in time; what it had found beyond that point is forgotten.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_stage: dict[str, dict[int, dict[tuple[str, str], Record]]] = {}
        for item in records:
            epochs = self.by_stage.setdefault(item.stage, {})
            for later in [epoch for epoch in epochs if epoch > item.epoch]:
                del epochs[later]
            epochs.setdefault(item.epoch, {})[item.key] = item

    def last(self) -> list[Record]:
        """The last test, else the last validation, else whatever there is."""
        for stage in ("test", "val", *self.by_stage):
            if epochs := self.by_stage.get(stage):
                return list(epochs[max(epochs)].values())
        return []

    def series(self, stage: str = "val") -> dict[tuple[str, str], list[Record]]:
        """(attack, target) -> its records by epoch."""
        found: dict[tuple[str, str], list[Record]] = {}
        for _, records in sorted(self.by_stage.get(stage, {}).items()):
            for key, item in records.items():
                found.setdefault(key, []).append(item)
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(fields: Fields, key: str) -> float:
    value = fields.get(key)
    return float(value) if _is_number(value) and math.isfinite(value) else 0.0  # type: ignore


def _text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return "" if value is None else str(value)
