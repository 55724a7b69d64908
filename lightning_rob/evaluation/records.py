"""Records of evaluations: lines of JSON that follow `record.schema.json`.

Every record has a `schema`, the version of the format, and a `kind`. Attacks and threats are
{"class_path": …, "init_args": {…}}. A number that is not finite is null, for JSON has none.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from torch import Tensor

import lightning_rob
from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import inner_attacks, walk
from lightning_rob.metrics import wilson_over_draws
from lightning_rob.runtime.files import append_lines
from lightning_rob.runtime.identity import attack_spec

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
# Distinguishes this process's evaluations from other processes' in the same folder.
SESSION = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {os.getpid()}"


@dataclass(frozen=True)
class Result:
    """Accuracy in [0, 1] on n images under one attack, with its 95 % interval."""

    name: str
    accuracy: float
    interval: tuple[float, float]
    n: int
    seconds: float  # run time of the attack on this process
    details: dict[str, Any]  # other fields of the record

    def record(self) -> dict[str, Any]:
        """Return the record as plain data."""
        fields = asdict(self)
        head = {"kind": "accuracy", "name": fields.pop("name"), **fields.pop("details")}
        return with_schema(head | fields)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the result that has this record."""
        details = {name: v for name, v in record.items() if name not in ("schema", "kind")}
        name, accuracy, (low, high), n, seconds = (
            details.pop(field) for field in ("name", "accuracy", "interval", "n", "seconds")
        )
        low, high, accuracy = (math.nan if v is None else v for v in (low, high, accuracy))
        return cls(name, accuracy, (low, high), n, seconds, details)


def measured(
    name: str, scores: Tensor, seconds: float, details: dict[str, Any], draws: Tensor | None = None
) -> Result:
    """Return the mean of images' scores [N], NaN without images, with its interval."""
    n, accuracy = len(scores), float(scores.mean()) if len(scores) else float("nan")
    # With scores by private draw [N, D] the interval covers the draws' randomness too.
    by_draw = [accuracy] if draws is None or not n else draws.mean(0).tolist()
    return Result(name, accuracy, wilson_over_draws(by_draw, n), n, seconds, details)


_installed = cache(version)  # which reads a file: as long as a small evaluation in each epoch


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on."""
    others = {name: _installed(name) for name in ("torch", "lightning", "torchvision")}
    return {"lightning-rob": lightning_rob.__version__, **others}


def threat_model_card(attack: Attack) -> dict[str, Any]:
    """Return what an attacker may do and knows, as plain data."""
    threat, every = attack.threat, list(walk(attack))
    card: dict[str, Any] = {
        "norm": str(threat.norm),
        "eps": threat.eps,
        "relative": threat.relative,
        "bounds": list(threat.bounds),
    }
    for name in ("steps", "restarts", "draws", "passes"):
        values = [getattr(part, name) for part in every if getattr(part, name, None) is not None]
        card[name] = max(values, default=None)
    if card["passes"]:
        card["steps"] = None
    return card | {"knowledge": knowledge_of(attack), "attack": attack_spec(attack)}


def knowledge_of(attack: Attack) -> str:
    """Return what the attacker knows; for attacks made of others, what these know."""
    if attack.knowledge != Attack.knowledge:
        return attack.knowledge
    known = dict.fromkeys(map(knowledge_of, inner_attacks(attack)))
    return "; ".join(known) or attack.knowledge


def with_schema(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the version of its format, as data that JSON can hold."""

    def ready(content: Any) -> Any:
        if isinstance(content, Mapping):
            return {str(key): ready(part) for key, part in content.items()}
        if isinstance(content, list | tuple):
            return [ready(part) for part in content]
        return None if isinstance(content, float) and not math.isfinite(content) else content

    return ready({"schema": SCHEMA, **record})


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON per record to a file, created if necessary: all of them or none."""
    append_lines(path, (json.dumps(with_schema(r), allow_nan=False) for r in records))
